//! A failure means that what a user sets in an overlay (image, namespace, pull secret, component)
//! does not reach a resource, or that kustomize makes one that the API does not take. Judges:
//! kubectl's kustomize, and the API's own types.

use super::operator::refused_by_the_operator;
use crate::collect::folder;
use crate::{project, write};
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// The two kustomizations, with the name of each one's resources.
const BOTH: [(&str, &str); 2] = [
    ("src/image/deploy", "kata-gpu-installer"),
    ("src/collect/deploy", "kata-gpu-collector"),
];
/// Components of the collector, which are off.
const COMPONENTS: [&str; 3] = ["pod-monitor", "alerts", "events"];

/// Resources of a kustomization. None, with the reason printed, where kubectl is missing.
fn resources(dir: &Path) -> Option<Vec<Value>> {
    let Ok(output) = Command::new("kubectl").arg("kustomize").arg(dir).output() else {
        eprintln!("skipped: kubectl is not there");
        return None;
    };
    assert!(output.status.success(), "{}", crate::stderr(&output));
    let text = crate::stdout(&output);
    let documents = serde_yaml::Deserializer::from_str(&text);
    Some(
        documents
            .map(|one| Value::deserialize(one).unwrap())
            .collect(),
    )
}

/// A path as kustomize takes them: relative to the overlay's folder.
fn relative(path: &Path, folder: &Path) -> String {
    let up = "../".repeat(folder.components().count() - 1);
    format!("{up}{}", path.display().to_string().trim_start_matches('/'))
}

/// The example of a page, in YAML, that has this text.
fn example(page: &str, text: &str) -> String {
    let page = crate::text(project().join(page));
    let blocks = page.split("```yaml\n").skip(1);
    let mut blocks = blocks.filter_map(|block| block.split("```").next());
    let found = blocks.find(|block| block.contains(text));
    found
        .unwrap_or_else(|| panic!("no example with {text}"))
        .to_string()
}

/// Resources of an overlay over a kustomization of the project.
pub fn overlay(base: &str, components: &[&str], more: &str) -> Option<Vec<Value>> {
    let dir = folder();
    let base = project().join(base);
    // kustomize takes relative paths alone.
    let own = dir.0.canonicalize().unwrap();
    let base = relative(&base, &own);
    let components: Vec<String> = components.iter().map(|c| format!("{base}/{c}")).collect();
    let text = format!(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n\
         resources: ['{base}']\ncomponents: {components:?}\n{more}"
    );
    write(dir.0.join("kustomization.yaml"), text);
    resources(&own)
}

pub fn of_kind<'a>(all: &'a [Value], kind: &str) -> &'a Value {
    let found = all.iter().find(|one| one["kind"] == kind);
    found.unwrap_or_else(|| panic!("no {kind}"))
}

/// Fields of a resource that are lost, or changed, on the way through the API's own type; for the
/// Prometheus operator's kinds also what its definition refuses. None for other kinds, and where
/// that definition is missing.
pub fn lost_in_the_api(resource: &Value) -> Option<Result<(), String>> {
    use k8s_openapi::api::{apps, core, rbac};
    use k8s_openapi::apimachinery::pkg::apis::meta;
    use serde::{Serialize, de::DeserializeOwned};
    fn through<T: Serialize + DeserializeOwned>(resource: &Value) -> Result<(), String> {
        let read: T = serde_json::from_value(resource.clone()).map_err(|e| e.to_string())?;
        let back = serde_json::to_value(read).map_err(|e| e.to_string())?;
        match back == *resource {
            true => Ok(()),
            false => Err(format!("printed {resource}\nread    {back}")),
        }
    }
    Some(match resource["kind"].as_str()? {
        "DaemonSet" => through::<apps::v1::DaemonSet>(resource),
        "ServiceAccount" => through::<core::v1::ServiceAccount>(resource),
        "Event" => through::<core::v1::Event>(resource),
        "ConfigMap" => through::<core::v1::ConfigMap>(resource),
        "ClusterRole" => through::<rbac::v1::ClusterRole>(resource),
        "ClusterRoleBinding" => through::<rbac::v1::ClusterRoleBinding>(resource),
        "PodMonitor" | "PrometheusRule" => {
            let refused = refused_by_the_operator(resource)?;
            refused.and_then(|()| through::<meta::v1::ObjectMeta>(&resource["metadata"]))
        }
        _ => return None,
    })
}

/// Every container of a DaemonSet, of its start, too.
fn containers(set: &Value) -> Vec<&Value> {
    let pod = &set["spec"]["template"]["spec"];
    let lists = [&pod["initContainers"], &pod["containers"]];
    lists
        .into_iter()
        .filter_map(Value::as_array)
        .flatten()
        .collect()
}

#[test]
fn both_kustomizations_make_resources_that_the_api_takes() {
    for (dir, name) in BOTH {
        let Some(all) = resources(&project().join(dir)) else {
            return;
        };
        for resource in &all {
            assert_eq!(lost_in_the_api(resource), Some(Ok(())));
            assert_eq!(resource["metadata"]["namespace"], "kube-system");
        }
        let set = of_kind(&all, "DaemonSet");
        assert_eq!(set["metadata"]["name"], name);
        let pod = &set["spec"]["template"]["spec"];
        assert_eq!(
            pod["serviceAccountName"],
            of_kind(&all, "ServiceAccount")["metadata"]["name"]
        );
        let image = format!("{name}:{}", env!("CARGO_PKG_VERSION"));
        assert!(
            containers(set)
                .iter()
                .all(|container| container["image"] == *image)
        );
        // Negative controls.
        for (place, field) in [("/spec/template/spec", "serviceAcountName"), ("", "specs")] {
            let mut bad = set.clone();
            bad.pointer_mut(place).unwrap()[field] = "x".into();
            assert!(matches!(lost_in_the_api(&bad), Some(Err(_))), "{field}");
        }
    }
}

#[test]
fn an_overlay_sets_image_namespace_and_pull_secret() {
    for (dir, name) in BOTH {
        let more = format!(
            "namespace: gpu-nodes\n\
             images: [{{name: {name}, newName: registry.example/x, digest: 'sha256:{}'}}]\n\
             patches:\n  - target: {{kind: ServiceAccount}}\n    patch: |\n      \
             - {{op: add, path: /imagePullSecrets, value: [{{name: registry}}]}}\n",
            "0".repeat(64)
        );
        let components = if dir.contains("collect") {
            &COMPONENTS[..]
        } else {
            &[]
        };
        let Some(all) = overlay(dir, components, &more) else {
            return;
        };
        assert!(all.len() >= 3, "{all:#?}");
        for resource in &all {
            let (kind, metadata) = (&resource["kind"], &resource["metadata"]);
            match kind.as_str().unwrap().starts_with("Cluster") {
                true => assert!(metadata.get("namespace").is_none(), "{kind}"),
                false => assert_eq!(metadata["namespace"], "gpu-nodes", "{kind}"),
            }
            assert!(
                !matches!(lost_in_the_api(resource), Some(Err(_))),
                "{resource}"
            );
        }
        let account = of_kind(&all, "ServiceAccount");
        assert_eq!(account["imagePullSecrets"][0]["name"], "registry");
        let set = of_kind(&all, "DaemonSet");
        let image = format!("registry.example/x@sha256:{}", "0".repeat(64));
        let own = containers(set)
            .into_iter()
            .filter(|one| one["name"] != "api");
        assert!(own.inspect(|one| assert_eq!(one["image"], *image)).count() > 0);
    }
}

#[test]
fn the_pages_examples_are_overlays_that_do_what_they_say() {
    let dir = folder();
    let own = dir.0.canonicalize().unwrap();
    let examples = [
        example("src/cli/README.md", "kata-gpu-init/src/collect/deploy"),
        example("src/collect/fleet/ALERTS.md", "runbook_url"),
        example("initrd/README.md", "GUEST="),
    ];
    // A user's one file: lists of the same key are one list.
    let mut whole = serde_yaml::Mapping::new();
    for (key, value) in examples.iter().flat_map(|text| {
        let mapping: serde_yaml::Mapping = serde_yaml::from_str(text).unwrap();
        mapping
    }) {
        match (
            whole
                .get_mut(&key)
                .and_then(|there| there.as_sequence_mut()),
            &value,
        ) {
            (Some(there), serde_yaml::Value::Sequence(more)) => there.extend(more.clone()),
            _ => drop(whole.insert(key, value)),
        }
    }
    let text = serde_yaml::to_string(&whole).unwrap();
    let text = text.replace("kata-gpu-init/src", &relative(&project().join("src"), &own));
    write(own.join("kustomization.yaml"), text);
    let Some(all) = resources(&own) else {
        return;
    };
    let rules = of_kind(&all, "PrometheusRule")["spec"]["groups"][0]["rules"]
        .as_array()
        .unwrap();
    let page = "https://git.example/kata-gpu-init/blob/main/src/collect/fleet/ALERTS.md#katagpu";
    for rule in rules {
        let url = rule["annotations"]["runbook_url"].as_str().unwrap();
        assert!(url.starts_with(page), "{url}");
    }
    let maps = all.iter().filter(|one| one["kind"] == "ConfigMap");
    let guests: Vec<&Value> = maps.map(|map| &map["data"]["GUEST"]).collect();
    assert_eq!(
        guests,
        ["--image=/gpu.image"],
        "and nothing of the replacement"
    );
    for set in all.iter().filter(|one| one["kind"] == "DaemonSet") {
        assert_eq!(set["metadata"]["namespace"], "gpu-nodes");
        let image = containers(set)[0]["image"].as_str().unwrap();
        assert!(image.starts_with("registry.example/kata-gpu-"), "{image}");
    }
    for account in all.iter().filter(|one| one["kind"] == "ServiceAccount") {
        assert_eq!(account["imagePullSecrets"][0]["name"], "registry");
    }
}

#[test]
fn an_overlay_sets_the_installers_guest() {
    let more = format!(
        "namespace: gpu-nodes\n{}",
        example("initrd/README.md", "GUEST=")
    );
    let Some(all) = overlay("src/image/deploy", &[], &more) else {
        return;
    };
    let (map, set) = (of_kind(&all, "ConfigMap"), of_kind(&all, "DaemonSet"));
    assert_eq!(map["data"]["GUEST"], "--image=/gpu.image");
    assert!(map["data"]["KATA_CONFIG"].is_string());
    // A new guest is a new name, so that the pods are made again.
    assert_ne!(map["metadata"]["name"], "kata-gpu-installer");
    for container in containers(set) {
        assert_eq!(
            container["envFrom"][0]["configMapRef"]["name"],
            map["metadata"]["name"]
        );
    }
}

#[test]
fn prometheus_reaches_the_collector_by_annotations_and_by_the_operators_resource() {
    let Some(all) = overlay("src/collect/deploy", &["pod-monitor"], "") else {
        return;
    };
    let set = of_kind(&all, "DaemonSet");
    let template = &set["spec"]["template"];
    let collect = &template["spec"]["containers"][0];
    // The listener's address, with the kubelet's value of the variable.
    let words = collect["command"].as_array().unwrap().iter();
    let mut words = words.filter_map(|word| word.as_str()?.strip_prefix("--metrics="));
    let text = words.next().expect("--metrics");
    let env = collect["env"].as_array().unwrap();
    let ip = env.iter().find(|one| one["name"] == "POD_IP").unwrap();
    assert_eq!(ip["valueFrom"]["fieldRef"]["fieldPath"], "status.podIP");
    for ip in ["10.0.0.7", "fd00::7"] {
        let text = text.replace("$(POD_IP)", ip);
        let address = kata_gpu_collect::fleet::http_server::parse_address(&text).unwrap();
        assert_eq!(address.ip().to_string(), ip);
        assert_eq!(collect["ports"][0]["containerPort"], address.port());
        let annotations = &template["metadata"]["annotations"];
        assert_eq!(
            annotations["prometheus.io/port"],
            address.port().to_string()
        );
        assert_eq!(
            annotations["prometheus.io/path"],
            kata_gpu_collect::fleet::http_server::PATH
        );
        assert_eq!(annotations["prometheus.io/scrape"], "true");
    }
    let monitor = &of_kind(&all, "PodMonitor")["spec"];
    assert_eq!(
        monitor["selector"]["matchLabels"],
        template["metadata"]["labels"]
    );
    assert_eq!(
        monitor["podMetricsEndpoints"][0]["port"],
        collect["ports"][0]["name"]
    );
    // A cluster without the operator refuses the resource: it is off.
    let without = overlay("src/collect/deploy", &[], "").unwrap();
    assert!(without.iter().all(|one| one["kind"] != "PodMonitor"));
}

#[test]
fn the_component_for_events_gives_one_right_to_one_container() {
    let Some(all) = overlay("src/collect/deploy", &["events"], "namespace: gpu-nodes\n") else {
        return;
    };
    let role = of_kind(&all, "ClusterRole");
    let rules = role["rules"].as_array().unwrap();
    assert_eq!(rules.len(), 1);
    assert_eq!(rules[0]["apiGroups"], json!([""]));
    assert_eq!(rules[0]["resources"], json!(["events"]));
    assert_eq!(rules[0]["verbs"], json!(["create"]));
    let (account, binding) = (
        of_kind(&all, "ServiceAccount"),
        of_kind(&all, "ClusterRoleBinding"),
    );
    let subject = json!([{
        "kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "gpu-nodes",
    }]);
    assert_eq!(binding["subjects"], subject);
    assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
    let pod = &of_kind(&all, "DaemonSet")["spec"]["template"]["spec"];
    assert_eq!(pod["automountServiceAccountToken"], false);
    let containers = pod["containers"].as_array().unwrap();
    let mounting = |volume: &str| -> Vec<&str> {
        let has = |one: &&Value| {
            let mut mounts = one["volumeMounts"].as_array().unwrap().iter();
            mounts.any(|mount| mount["name"] == volume)
        };
        let has = containers.iter().filter(has);
        has.map(|one| one["name"].as_str().unwrap()).collect()
    };
    assert_eq!(mounting("api-token"), ["api"]);
    assert_eq!(mounting("api-socket"), ["collect", "api"]);
    // The user that the collector becomes can write to the socket that the other one makes.
    let user = format!("--user={}", containers[1]["securityContext"]["runAsUser"]);
    assert!(
        containers[0]["command"]
            .as_array()
            .unwrap()
            .contains(&json!(user))
    );
    let socket = |list: &Value, option: &str| -> String {
        let words = list.as_array().unwrap().iter();
        let mut words = words.filter_map(|word| word.as_str()?.strip_prefix(option));
        words.next().unwrap().to_string()
    };
    assert_eq!(
        socket(&containers[0]["command"], "--kubernetes=unix:"),
        socket(&containers[1]["args"], "--unix-socket=")
    );
    // An overlay without the component has none of it.
    let without = overlay("src/collect/deploy", &[], "").unwrap();
    assert!(without.iter().all(|one| one["kind"] != "ClusterRole"));
}
