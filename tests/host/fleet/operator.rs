//! A failure means that an API server with the Prometheus operator refuses a resource of a
//! component. Judge: the operator's own definitions of its kinds (CRDs), read as the API server
//! reads them for kubectl. The operator itself runs in no test.

use super::kustomize::{lost_in_the_api, of_kind, overlay};
use super::tool;
use serde_json::{Value, json};

/// A resource of the operator's after its definition. None, with the reason printed, where the
/// definitions are missing. For kinds that the operator does not define: None.
pub fn refused_by_the_operator(resource: &Value) -> Option<Result<(), String>> {
    let (group, version) = resource["apiVersion"].as_str()?.split_once('/')?;
    if group != "monitoring.coreos.com" {
        return None;
    }
    let kind = resource["kind"].as_str()?.to_lowercase();
    let path = tool(&format!("prometheus-operator/{group}_{kind}s.yaml"))?;
    let definition: Value = serde_yaml::from_str(&crate::text(path)).unwrap();
    let versions = definition["spec"]["versions"].as_array().unwrap();
    let mut served = versions.iter().filter(|one| one["served"] == true);
    let Some(found) = served.find(|one| one["name"] == version) else {
        return Some(Err(format!("no version {version} of {kind}")));
    };
    let mut schema = found["schema"]["openAPIV3Schema"].clone();
    refuse_unknown_fields(&mut schema);
    // OpenAPI 3.0 has the words of this draft.
    let judge = jsonschema::draft4::new(&schema).unwrap();
    let errors = judge.iter_errors(resource);
    let errors: Vec<String> = errors
        .map(|e| format!("{}: {e}", e.instance_path()))
        .collect();
    Some(match errors.is_empty() {
        true => Ok(()),
        false => Err(errors.join("\n")),
    })
}

/// An API server asked for strict validation, as kubectl asks, refuses fields that a schema does
/// not name. JSON schemas allow them unless they have this word.
fn refuse_unknown_fields(schema: &mut Value) {
    let Some(words) = schema.as_object_mut() else {
        return;
    };
    for word in ["items", "additionalProperties"] {
        if let Some(inner) = words.get_mut(word) {
            refuse_unknown_fields(inner);
        }
    }
    let open = words.contains_key("x-kubernetes-preserve-unknown-fields");
    if let Some(fields) = words.get_mut("properties").and_then(Value::as_object_mut) {
        fields.values_mut().for_each(refuse_unknown_fields);
        if !open {
            words.insert("additionalProperties".into(), false.into());
        }
    }
}

#[test]
fn the_operators_definitions_take_the_components_resources() {
    let Some(all) = overlay("src/collect/deploy", &["pod-monitor", "alerts"], "") else {
        return;
    };
    let of_operator = |one: &&Value| one["apiVersion"].as_str().unwrap().contains("coreos.com/");
    assert_eq!(all.iter().filter(of_operator).count(), 2);
    let (monitor, rules) = (of_kind(&all, "PodMonitor"), of_kind(&all, "PrometheusRule"));
    let (endpoint, rule) = ("/spec/podMetricsEndpoints/0", "/spec/groups/0/rules/0");
    let relabeling = &format!("{endpoint}/relabelings/0");
    for resource in [monitor, rules] {
        let Some(taken) = lost_in_the_api(resource) else {
            return;
        };
        assert_eq!(taken, Ok(()));
    }
    // Negative controls: unknown, of another type or form, missing (null).
    for (resource, place, field, value) in [
        (monitor, "", "specs", json!({})),
        (monitor, "", "apiVersion", json!("monitoring.coreos.com/v2")),
        (monitor, "/metadata", "lables", json!({})),
        (monitor, endpoint, "prot", json!("metrics")),
        (monitor, endpoint, "port", json!(9464)),
        (monitor, endpoint, "interval", json!("30 s")),
        (monitor, relabeling, "action", json!("replacing")),
        (monitor, "/spec", "selector", json!(null)),
        (rules, rule, "expression", json!("up")),
        (rules, rule, "labels", json!({"severity": 1})),
        (rules, rule, "for", json!("5 minutes")),
        (rules, rule, "expr", json!(null)),
        (rules, "/spec/groups/0", "name", json!(null)),
    ] {
        let mut bad = resource.clone();
        let fields = bad.pointer_mut(place).unwrap().as_object_mut().unwrap();
        match value {
            Value::Null => drop(fields.remove(field).unwrap()),
            value => drop(fields.insert(field.into(), value)),
        }
        let said = lost_in_the_api(&bad).unwrap();
        assert!(said.is_err(), "{place}/{field} is taken: {bad}");
    }
}
