//! `install --print`: YAML that parses into what Kubernetes and kata-deploy's chart expect, with
//! the drop-in that `install` itself would write.

use crate::install::{World, done, toml_of};
use serde_yaml::Value;

fn printed(world: &World, words: &[&str]) -> String {
    let before = world.snapshot();
    let said = world.install_initrd(&[&["--print"], words].concat());
    assert_eq!(world.snapshot(), before, "printing writes nothing");
    done(&said).to_string()
}

fn check_class(class: &Value, name: &str, handler: &str, memory: &str) {
    assert_eq!(class["apiVersion"], "node.k8s.io/v1");
    assert_eq!(class["kind"], "RuntimeClass");
    assert_eq!(class["metadata"]["name"], name);
    assert_eq!(class["handler"], handler);
    assert_eq!(class["overhead"]["podFixed"]["memory"], memory);
    assert_eq!(
        class["overhead"]["podFixed"]["cpu"], "1",
        "a quantity is a string"
    );
    assert_eq!(
        class["scheduling"]["nodeSelector"]["katacontainers.io/kata-runtime"], "true",
        "a label is a string"
    );
    let mut keys: Vec<&str> = class
        .as_mapping()
        .unwrap()
        .keys()
        .map(|key| key.as_str().unwrap())
        .collect();
    keys.sort_unstable();
    assert_eq!(
        keys,
        [
            "apiVersion",
            "handler",
            "kind",
            "metadata",
            "overhead",
            "scheduling"
        ]
    );
}

#[test]
fn the_runtime_class_is_one_that_kubernetes_takes() {
    let world = World::new("class", "go-qemu-nvidia-gpu");
    let class: Value = serde_yaml::from_str(&printed(&world, &["runtimeclass"])).unwrap();
    check_class(
        &class,
        "kata-qemu-nvidia-gpu",
        "kata-qemu-nvidia-gpu",
        "10240Mi",
    );
    world.edit("default_memory = 8192", "default_memory = 16384");
    let class: Value =
        serde_yaml::from_str(&printed(&world, &["runtimeclass", "--name", "gpu-fast"])).unwrap();
    check_class(&class, "gpu-fast", "kata-qemu-nvidia-gpu", "18432Mi");
}

#[test]
fn the_values_are_what_the_chart_reads() {
    let world = World::new("helm", "rust-qemu-nvidia-gpu");
    let words = ["--param", "nvidia.NVreg_RegistryDwords=\"a=1 b=2\""];
    let yaml = printed(&world, &[&["helm"], words.as_slice()].concat());
    let values: Value = serde_yaml::from_str(&yaml).unwrap();
    assert_eq!(values["customRuntimes"]["enabled"], true);
    let runtimes = values["customRuntimes"]["runtimes"].as_mapping().unwrap();
    assert_eq!(runtimes.len(), 1);
    let (name, runtime) = runtimes.iter().next().unwrap();
    assert_eq!(name, "kata-qemu-nvidia-gpu-init");
    assert_eq!(runtime["baseConfig"], "qemu-nvidia-gpu");
    let class: Value = serde_yaml::from_str(runtime["runtimeClass"].as_str().unwrap()).unwrap();
    check_class(
        &class,
        "kata-qemu-nvidia-gpu-init",
        "kata-qemu-nvidia-gpu-init",
        "10240Mi",
    );
    // The chart looks for this line itself, and takes what follows as it stands.
    let handlers: Vec<&str> = runtime["runtimeClass"]
        .as_str()
        .unwrap()
        .lines()
        .filter_map(|line| line.trim().strip_prefix("handler:"))
        .collect();
    assert_eq!(handlers, [" kata-qemu-nvidia-gpu-init"]);
    // The drop-in that the DaemonSet puts on every node is the one that install writes here.
    let drop_in = toml_of(runtime["dropIn"].as_str().unwrap().as_bytes());
    done(&world.install_initrd(&words));
    assert_eq!(drop_in, toml_of(&std::fs::read(world.ours()).unwrap()));
    assert!(
        drop_in["hypervisor"]["qemu"]["kernel_params"]
            .as_str()
            .unwrap()
            .ends_with("nvidia.NVreg_RegistryDwords=\"a=1 b=2\"")
    );
}

/// With HELM (the program) and KATA_DEPLOY_CHART (the chart's folder, of Kata's release): what the
/// chart itself makes of the values.
#[test]
fn kata_deploys_own_chart_renders_the_values() {
    let (Some(helm), Some(chart)) = (
        std::env::var_os("HELM"),
        std::env::var_os("KATA_DEPLOY_CHART"),
    ) else {
        return eprintln!(
            "skipped: HELM and KATA_DEPLOY_CHART do not name the program and Kata's chart"
        );
    };
    for fixture in ["go-qemu-nvidia-gpu", "rust-qemu-nvidia-gpu"] {
        let world = World::new("chart", fixture);
        let words = ["--param", "nvidia.NVreg_RegistryDwords=\"a=1 b=2\""];
        let values = world.root().join("values.yaml");
        std::fs::write(
            &values,
            printed(&world, &[&["helm"], words.as_slice()].concat()),
        )
        .unwrap();
        let mut command = std::process::Command::new(&helm);
        let rendered = command
            .args(["template", "kata-deploy"])
            .arg(&chart)
            .arg("-f")
            .arg(&values)
            .output()
            .unwrap();
        assert!(
            rendered.status.success(),
            "{}",
            String::from_utf8_lossy(&rendered.stderr)
        );
        let text = String::from_utf8(rendered.stdout).unwrap();
        let documents = text
            .split("\n---\n")
            .filter_map(|document| serde_yaml::from_str::<Value>(document).ok())
            .collect::<Vec<_>>();
        let name = "kata-qemu-nvidia-gpu-init";
        let class = documents
            .iter()
            .find(|d| d["kind"] == "RuntimeClass" && d["metadata"]["name"] == name)
            .unwrap();
        assert_eq!(
            (
                class["handler"].as_str(),
                class["overhead"]["podFixed"]["memory"].as_str()
            ),
            (Some(name), Some("10240Mi"))
        );
        let drop_in = documents
            .iter()
            .find_map(|d| d["data"][format!("dropin-{name}.toml")].as_str())
            .unwrap();
        done(&world.install_initrd(&words));
        assert_eq!(
            toml_of(drop_in.as_bytes()),
            toml_of(&std::fs::read(world.ours()).unwrap()),
            "{fixture}"
        );
    }
}

#[test]
fn the_chart_accepts_a_directory_that_configurations_share() {
    let world = World::new("helm-shared", "go-qemu-nvidia-gpu");
    std::fs::write(world.config.with_file_name("configuration-qemu.toml"), "").unwrap();
    assert!(printed(&world, &["helm"]).contains("customRuntimes:"));
    let said = world.install_initrd(&["--print", "runtimeclass"]);
    assert!(
        said.code == 1 && said.err.contains("configuration-qemu.toml"),
        "{said:?}"
    );
}

#[test]
fn any_text_in_the_drop_in_survives_yaml() {
    for odd in [
        "a: b # c",
        "- x",
        "{{ .Values.x }}",
        "é \u{1f600}",
        "'\"\\\\",
    ] {
        let world = World::new("yaml", "go-qemu-nvidia-gpu");
        let initrd = world.root().join(odd.replace('/', "_"));
        std::fs::copy(&world.initrd, &initrd).unwrap();
        let said = world.install(&[
            "--initrd",
            initrd.to_str().unwrap(),
            "--print",
            "helm",
            "--name",
            "kata-x",
        ]);
        let values: Value = serde_yaml::from_str(done(&said)).unwrap();
        let drop_in = toml_of(
            values["customRuntimes"]["runtimes"]["kata-x"]["dropIn"]
                .as_str()
                .unwrap()
                .as_bytes(),
        );
        assert_eq!(
            drop_in["hypervisor"]["qemu"]["initrd"].as_str(),
            initrd.to_str(),
            "{odd}"
        );
    }
}

#[test]
fn an_unknown_name_is_asked_for_and_no_bad_manifest_printed() {
    let world = World::new("names", "go-qemu-nvidia-gpu");
    let plain = world.config.with_file_name("configuration.toml");
    std::fs::rename(&world.config, &plain).unwrap();
    let world = World {
        config: plain,
        ..world
    };
    let said = world.install_initrd(&["--print", "runtimeclass"]);
    assert!(
        said.code == 1 && said.out.is_empty() && said.err.contains("--name"),
        "{said:?}"
    );
    let class: Value =
        serde_yaml::from_str(&printed(&world, &["runtimeclass", "--name", "kata-gpu"])).unwrap();
    check_class(&class, "kata-gpu", "kata-gpu", "10240Mi");
    let said = world.install_initrd(&["--print", "helm", "--name", "kata-gpu"]);
    assert!(
        said.code == 1 && said.err.contains("base configuration"),
        "{said:?}"
    );
    world.edit("vm_cache_number = 0", "vm_cache_number = 1");
    let said = world.install_initrd(&["--print", "runtimeclass", "--name", "kata-gpu"]);
    assert!(
        said.code == 1 && said.out.is_empty() && said.err.contains("vm_cache_number"),
        "{said:?}"
    );
}
