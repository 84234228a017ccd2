//! A failure means that a spec with a wrong field or value could pass CDI's JSON schema here, or
//! that a right one does not: all other tests of specs rely on this judge (`fits`). The schema is
//! stricter than that of Kata 4's crate, which says nothing of common edits, unknown fields or
//! texts.

use crate::{bytes, project};
use container_device_interface_1::schema::{compile_builtin_schema, compile_cdi_schema, validate};
use serde_json::{Value, json};
use std::sync::LazyLock;

type Check = Box<dyn Fn(&[u8]) -> Result<(), String> + Send + Sync>;

/// The project's own, strict one.
static STRICT: LazyLock<Check> = LazyLock::new(|| {
    let text = bytes(project().join("tests/fixtures/cdi/schema.json"));
    // Its definitions are in the same file.
    let schema = compile_cdi_schema(&text, &text).unwrap();
    Box::new(move |spec| validate(&schema, spec).map_err(|e| format!("{e:#}")))
});

/// The one in the crate.
static OF_THE_CRATE: LazyLock<Check> = LazyLock::new(|| {
    let schema = compile_builtin_schema().unwrap();
    Box::new(move |spec| validate(&schema, spec).map_err(|e| format!("{e:#}")))
});

/// A spec's text passes both.
pub fn fits(spec: &[u8]) {
    for check in [&STRICT, &OF_THE_CRATE] {
        check(spec).unwrap_or_else(|error| panic!("{error}\n{}", String::from_utf8_lossy(spec)));
    }
}

/// One of everything that there is.
fn everything() -> Value {
    json!({
        "cdiVersion": "1.1.0",
        "kind": "nvidia.com/imex-channel",
        "annotations": { "a": "b" },
        "devices": [{ "name": "0:1", "annotations": {}, "containerEdits": { "deviceNodes": [{
            "path": "/dev/a", "hostPath": "/dev/b", "type": "c", "major": 195, "minor": 255,
            "fileMode": 0o666, "permissions": "rwm", "uid": 0, "gid": 44,
        }]}}],
        "containerEdits": {
            "env": ["A=", "B=c=d"],
            "mounts": [{ "hostPath": "/a", "containerPath": "/b", "options": ["ro"],
            "type": "bind" }],
            "hooks": [{ "hookName": "createContainer", "path": "/init", "args": ["hook"],
            "env": ["A=b"], "timeout": 1 }],
            "netDevices": [{ "hostInterfaceName": "eth0", "name": "eth1" }],
            "intelRdt": { "closID": "a", "schemata": ["x"], "enableMonitoring": true },
            "additionalGids": [44],
        },
    })
}

#[test]
fn a_spec_with_everything_and_the_incumbents_pass() {
    fits(everything().to_string().as_bytes());
    fits(&bytes(
        project().join("tests/fixtures/cdi/kata-8gpu-550.json"),
    ));
}

/// Negative control: each of these is one wrong thing.
#[test]
fn what_is_wrong_anywhere_is_refused() {
    const NODE: &str = "/devices/0/containerEdits/deviceNodes/0";
    let cases = [
        ("", "surprise", json!(1)),
        ("", "cdiVersion", json!("0.5")),
        ("", "kind", json!("gpu")),
        ("", "kind", json!("nvidia.com/gpu/0")),
        ("", "devices", json!([])),
        ("", "devices", json!("none")),
        ("/devices/0", "name", json!("a b")),
        ("/devices/0", "mounts", json!([])),
        (NODE, "path", json!("dev/a")),
        (NODE, "type", json!("x")),
        (NODE, "fileMode", json!("0666")),
        (NODE, "permissions", json!("rx")),
        (NODE, "minor", json!(1.5)),
        (NODE, "uid", json!(1_u64 << 32)),
        ("/containerEdits", "env", json!(["A"])),
        ("/containerEdits", "additionalGids", json!([-1])),
        ("/containerEdits/mounts/0", "options", json!("ro")),
        (
            "/containerEdits/hooks/0",
            "hookName",
            json!("create-container"),
        ),
        ("/containerEdits/hooks/0", "timeout", json!(-1)),
        ("/containerEdits/intelRdt", "enableMonitoring", json!("yes")),
    ];
    let (all, mut seen_by_the_crate) = (cases.len(), 0);
    for (pointer, name, value) in cases {
        let mut spec = everything();
        spec.pointer_mut(pointer).unwrap()[name] = value.clone();
        let text = spec.to_string();
        assert!(
            STRICT(text.as_bytes()).is_err(),
            "{pointer}/{name}: {value} passes"
        );
        seen_by_the_crate += usize::from(OF_THE_CRATE(text.as_bytes()).is_err());
    }
    assert!(
        seen_by_the_crate < all,
        "the crate's schema has become as strict: ours can go"
    );
    for (pointer, name) in [
        ("", "kind"),
        ("/devices/0", "containerEdits"),
        (NODE, "path"),
        ("/containerEdits/mounts/0", "hostPath"),
    ] {
        let mut spec = everything();
        spec.pointer_mut(pointer)
            .and_then(Value::as_object_mut)
            .unwrap()
            .remove(name);
        assert!(
            STRICT(spec.to_string().as_bytes()).is_err(),
            "without {pointer}/{name} it passes"
        );
    }
}
