//! The shape of a CDI spec as tables: the fields of each object, their types, and the first version
//! of CDI with each. Returns misfits with their JSON pointers, and the lowest version that the used
//! fields need.
//!
//! Numbers and truth values are no wrong type where text belongs: YAML parsers take `0` and `true`
//! as text there, and so do the agents.

use super::spec_rules::*;
use serde_json::{Map, Value};
use std::fmt;

/// A version of the CDI specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u8, pub u8, pub u8);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// The lowest version that agents take.
const LOWEST: Version = Version(0, 3, 0);
/// The highest version that agents up to 3.32 know.
pub const HIGHEST_OF_KATA3: Version = Version(0, 7, 0);

const RELEASED: [Version; 10] = [
    Version(0, 1, 0),
    Version(0, 2, 0),
    LOWEST,
    Version(0, 4, 0),
    Version(0, 5, 0),
    Version(0, 6, 0),
    HIGHEST_OF_KATA3,
    Version(0, 8, 0),
    Version(1, 0, 0),
    Version(1, 1, 0),
];

/// A version as specs declare it, with or without a `v`; None for an unknown version.
pub fn released(text: &str) -> Option<Version> {
    RELEASED
        .into_iter()
        .find(|v| v.to_string() == text.trim_start_matches('v'))
}

/// First version in which a field may be used.
enum Since {
    Always,
    /// Version that the field needs if it is there and not empty.
    Filled(Version),
    /// Version that the field needs if it is there.
    Present(Version),
}

enum Shape {
    Text,
    Texts,
    Numbers(i64, i64),
    /// A map of texts; for this shape alone null is no absence.
    TextMap,
    Number(i64, i64),
    Bool,
    Object(&'static [Field]),
    Objects(&'static [Field]),
}

struct Field {
    name: &'static str,
    shape: Shape,
    required: bool,
    since: Since,
}

const fn field(name: &'static str, shape: Shape) -> Field {
    Field {
        name,
        shape,
        required: false,
        since: Since::Always,
    }
}

const fn required(name: &'static str, shape: Shape) -> Field {
    Field {
        name,
        shape,
        required: true,
        since: Since::Always,
    }
}

const fn since(name: &'static str, shape: Shape, since: Since) -> Field {
    Field {
        name,
        shape,
        required: false,
        since,
    }
}

const U32: Shape = Shape::Number(0, u32::MAX as i64);
const I64: Shape = Shape::Number(i64::MIN, i64::MAX);

const SPEC: &[Field] = &[
    required("cdiVersion", Shape::Text),
    required("kind", Shape::Text),
    since(
        "annotations",
        Shape::TextMap,
        Since::Filled(Version(0, 6, 0)),
    ),
    required("devices", Shape::Objects(DEVICE)),
    field("containerEdits", Shape::Object(EDITS)),
];
const DEVICE: &[Field] = &[
    required("name", Shape::Text),
    since(
        "annotations",
        Shape::TextMap,
        Since::Filled(Version(0, 6, 0)),
    ),
    required("containerEdits", Shape::Object(EDITS)),
];
const EDITS: &[Field] = &[
    field("env", Shape::Texts),
    field("deviceNodes", Shape::Objects(NODE)),
    since(
        "netDevices",
        Shape::Objects(NET_DEVICE),
        Since::Filled(Version(1, 1, 0)),
    ),
    field("hooks", Shape::Objects(HOOK)),
    field("mounts", Shape::Objects(MOUNT)),
    since(
        "intelRdt",
        Shape::Object(INTEL_RDT),
        Since::Present(Version(0, 7, 0)),
    ),
    since(
        "additionalGids",
        Shape::Numbers(0, u32::MAX as i64),
        Since::Filled(Version(0, 7, 0)),
    ),
];
const NODE: &[Field] = &[
    required("path", Shape::Text),
    since("hostPath", Shape::Text, Since::Filled(Version(0, 5, 0))),
    field("type", Shape::Text),
    field("major", I64),
    field("minor", I64),
    field("fileMode", U32),
    field("permissions", Shape::Text),
    field("uid", U32),
    field("gid", U32),
];
const NET_DEVICE: &[Field] = &[
    required("hostInterfaceName", Shape::Text),
    required("name", Shape::Text),
];
const HOOK: &[Field] = &[
    required("hookName", Shape::Text),
    required("path", Shape::Text),
    field("args", Shape::Texts),
    field("env", Shape::Texts),
    field("timeout", U32),
];
const MOUNT: &[Field] = &[
    required("hostPath", Shape::Text),
    required("containerPath", Shape::Text),
    since("type", Shape::Text, Since::Filled(Version(0, 4, 0))),
    field("options", Shape::Texts),
];
const INTEL_RDT: &[Field] = &[
    field("closID", Shape::Text),
    field("l3CacheSchema", Shape::Text),
    field("memBwSchema", Shape::Text),
    since("schemata", Shape::Texts, Since::Present(Version(1, 1, 0))),
    since(
        "enableMonitoring",
        Shape::Bool,
        Since::Present(Version(1, 1, 0)),
    ),
    field("enableCMT", Shape::Bool),
    field("enableMBM", Shape::Bool),
];

/// A field that needs a version, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    pub version: Version,
    /// JSON pointer.
    pub pointer: String,
}

/// Result of the check of a spec's shape.
#[derive(Debug, Default)]
pub struct Shaped {
    pub findings: Vec<Finding>,
    /// First use of a field that needs the highest version; None where the lowest suffices.
    pub need: Option<Need>,
}

impl Shaped {
    /// The lowest version that suffices.
    pub fn minimum(&self) -> Version {
        self.need.as_ref().map_or(LOWEST, |n| n.version)
    }

    fn needs(&mut self, version: Version, pointer: &str) {
        if self.minimum() < version {
            self.need = Some(Need {
                version,
                pointer: pointer.to_string(),
            });
        }
    }
}

/// Compares the document with the tables.
pub fn check(file: &str, document: &Value) -> Shaped {
    let mut out = Shaped::default();
    let mut walk = Walk {
        file,
        pointer: String::new(),
        out: &mut out,
    };
    walk.object(document, SPEC);
    if let Some(kind) = document.get("kind").and_then(Value::as_str)
        && let Some((vendor, class)) = kind.split_once('/')
        && !vendor.is_empty()
        && class.contains('.')
        && !class.contains('/')
    {
        out.needs(Version(0, 6, 0), "/kind");
    }
    for (index, device) in document
        .get("devices")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .enumerate()
    {
        if let Some(name) = device.get("name").and_then(as_text)
            && !name.chars().next().is_some_and(char::is_alphabetic)
        {
            out.needs(Version(0, 5, 0), &format!("/devices/{index}/name"));
        }
    }
    out
}

/// A scalar as the text that an agent takes it for.
pub fn as_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(truth) => Some(truth.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

struct Walk<'a> {
    file: &'a str,
    pointer: String,
    out: &'a mut Shaped,
}

impl Walk<'_> {
    fn found(&mut self, rule: &'static Rule) -> Finding {
        Finding::new(rule, self.file, self.pointer.clone())
    }

    /// Runs `then` one step further down.
    fn at(&mut self, token: &str, then: impl FnOnce(&mut Self)) {
        let length = self.pointer.len();
        self.pointer.push('/');
        self.pointer
            .push_str(&token.replace('~', "~0").replace('/', "~1"));
        then(self);
        self.pointer.truncate(length);
    }

    fn object(&mut self, value: &Value, fields: &'static [Field]) {
        let Value::Object(object) = value else {
            return self.wrong(value, "an object");
        };
        self.unknown(object, fields);
        for field in fields {
            match object.get(field.name) {
                None if field.required => self.at(field.name, |w| {
                    let finding = w.found(&MISSING_FIELD);
                    w.out.findings.push(finding);
                }),
                None => {}
                Some(Value::Null) if !field.required && !matches!(field.shape, Shape::TextMap) => {}
                Some(value) => self.at(field.name, |w| w.field(value, field)),
            }
        }
    }

    fn unknown(&mut self, object: &Map<String, Value>, fields: &[Field]) {
        for name in object
            .keys()
            .filter(|name| !fields.iter().any(|f| f.name == *name))
        {
            self.at(name, |w| {
                let close = fields.iter().find(|f| {
                    f.name.eq_ignore_ascii_case(name)
                        || f.name.trim_end_matches('s') == name.trim_end_matches('s')
                });
                let mut finding = w.found(&UNKNOWN_FIELD).value(name);
                if let Some(close) = close {
                    finding = finding.cure(format!("write {}", close.name));
                }
                w.out.findings.push(finding);
            });
        }
    }

    fn field(&mut self, value: &Value, field: &'static Field) {
        let filled = match value {
            Value::String(text) => !text.is_empty(),
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            Value::Null | Value::Bool(_) | Value::Number(_) => true,
        };
        match field.since {
            Since::Always => {}
            Since::Filled(version) if !filled => debug_assert!(version > LOWEST),
            Since::Filled(version) | Since::Present(version) => {
                let pointer = self.pointer.clone();
                self.out.needs(version, &pointer);
            }
        }
        self.value(value, &field.shape);
    }

    fn value(&mut self, value: &Value, shape: &Shape) {
        match shape {
            Shape::Text if as_text(value).is_none() => self.wrong(value, "text"),
            Shape::Text => {}
            Shape::Bool if !value.is_boolean() => self.wrong(value, "true or false"),
            Shape::Bool => {}
            Shape::Number(low, high) => {
                if !value.as_i64().is_some_and(|n| (*low..=*high).contains(&n)) {
                    self.wrong(
                        value,
                        if *low == 0 {
                            "a number from 0 to 4294967295"
                        } else {
                            "a whole number"
                        },
                    );
                }
            }
            Shape::Numbers(low, high) => {
                self.list(value, |w, item| w.value(item, &Shape::Number(*low, *high)))
            }
            Shape::Texts => self.list(value, |w, item| w.value(item, &Shape::Text)),
            Shape::TextMap => match value {
                Value::Object(map) => map
                    .iter()
                    .for_each(|(key, item)| self.at(key, |w| w.value(item, &Shape::Text))),
                _ => self.wrong(value, "an object of texts"),
            },
            Shape::Object(fields) => self.object(value, fields),
            Shape::Objects(fields) => self.list(value, |w, item| w.object(item, fields)),
        }
    }

    fn list(&mut self, value: &Value, each: impl Fn(&mut Self, &Value)) {
        let Value::Array(list) = value else {
            return self.wrong(value, "a list");
        };
        for (index, item) in list.iter().enumerate() {
            self.at(&index.to_string(), |w| each(w, item));
        }
    }

    fn wrong(&mut self, value: &Value, wanted: &str) {
        let finding = self
            .found(&WRONG_TYPE)
            .value(value)
            .cure(format!("give {wanted}"));
        self.out.findings.push(finding);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn spec(device: Value) -> Value {
        json!({"cdiVersion": "0.3.0", "kind": "vendor.com/gpu", "devices": [device]})
    }

    fn found(document: &Value) -> Vec<(&'static str, String)> {
        check("f", document)
            .findings
            .into_iter()
            .map(|f| (f.rule.name, f.pointer))
            .collect()
    }

    #[test]
    fn each_field_needs_the_version_that_brought_it() {
        let edits = |edits: Value| spec(json!({"name": "a", "containerEdits": edits}));
        for (document, version, pointer) in [
            (edits(json!({"env": ["A=1"]})), "0.3.0", None),
            (
                edits(json!({"mounts": [{"hostPath": "/a", "containerPath": "/a", "type": ""}]})),
                "0.3.0",
                None,
            ),
            (
                edits(
                    json!({"mounts": [{"hostPath": "/a", "containerPath": "/a", "type": "bind"}]}),
                ),
                "0.4.0",
                Some("/devices/0/containerEdits/mounts/0/type"),
            ),
            (
                spec(json!({"name": "0", "containerEdits": {}})),
                "0.5.0",
                Some("/devices/0/name"),
            ),
            (
                edits(json!({"deviceNodes": [{"path": "/a", "hostPath": "/b"}]})),
                "0.5.0",
                Some("/devices/0/containerEdits/deviceNodes/0/hostPath"),
            ),
            (
                spec(json!({"name": "a", "annotations": {"x": "y"}, "containerEdits": {}})),
                "0.6.0",
                Some("/devices/0/annotations"),
            ),
            (
                json!({"kind": "v/a.b", "devices": []}),
                "0.6.0",
                Some("/kind"),
            ),
            (
                edits(json!({"additionalGids": [1]})),
                "0.7.0",
                Some("/devices/0/containerEdits/additionalGids"),
            ),
            (edits(json!({"additionalGids": []})), "0.3.0", None),
            (
                edits(json!({"intelRdt": {}})),
                "0.7.0",
                Some("/devices/0/containerEdits/intelRdt"),
            ),
            (
                edits(json!({"intelRdt": {"schemata": []}})),
                "1.1.0",
                Some("/devices/0/containerEdits/intelRdt/schemata"),
            ),
            (
                edits(json!({"netDevices": [{"hostInterfaceName": "a", "name": "b"}]})),
                "1.1.0",
                Some("/devices/0/containerEdits/netDevices"),
            ),
        ] {
            let shaped = check("f", &document);
            assert_eq!(shaped.minimum().to_string(), version, "{document}");
            assert_eq!(
                shaped.need.map(|n| n.pointer).as_deref(),
                pointer,
                "{document}"
            );
        }
    }

    #[test]
    fn what_does_not_fit_is_found_where_it_stands() {
        assert_eq!(found(&json!([])), [("wrong-type", String::new())]);
        assert_eq!(
            found(&json!({"kind": ["x"], "devices": {}})),
            [
                ("missing-field", "/cdiVersion".into()),
                ("wrong-type", "/kind".into()),
                ("wrong-type", "/devices".into())
            ]
        );
        let node = json!({"name": "a", "containerEdits": {"deviceNodes": [{"path": "/a", "fileMode": -1, "a/b~": 1, "major": "195", "uid": null}]}});
        let below = "/devices/0/containerEdits/deviceNodes/0/";
        assert_eq!(
            found(&spec(node)),
            [
                ("unknown-field", format!("{below}a~1b~0")),
                ("wrong-type", format!("{below}major")),
                ("wrong-type", format!("{below}fileMode"))
            ]
        );
        assert_eq!(
            found(&spec(
                json!({"name": 0, "containerEdits": {"env": [true, "A=1"], "additionalGids": [1]}})
            )),
            []
        );
    }

    #[test]
    fn a_name_that_is_nearly_right_is_corrected() {
        let shaped = check(
            "f",
            &spec(json!({"name": "a", "containerEdits": {"additionalGIDs": [], "mount": []}})),
        );
        let cures: Vec<&str> = shaped.findings.iter().map(|f| f.cure.as_ref()).collect();
        assert_eq!(cures, ["write additionalGids", "write mounts"]);
    }

    #[test]
    fn versions_are_ordered_as_numbers() {
        assert!(
            Version(0, 10, 0) > Version(0, 9, 0) && released("v0.5.0") == Some(Version(0, 5, 0))
        );
        assert_eq!(
            (released("0.5"), released("0.9.0"), released("")),
            (None, None, None)
        );
    }
}
