//! The provenance before in-toto's own messages, and before the files of its release.

use super::{released, sums};
use crate::export::Package;
use crate::{TempDir, text};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

const IN_TOTO: Package = Package {
    name: "in-toto-attestation==0.9.3",
    module: "in_toto_attestation.predicates.provenance.v1.provenance_pb2",
};
/// Reads statement and predicate with in-toto's messages, which refuse unknown keys, wrong types.
const READER: &str = "
import json, sys
from google.protobuf.json_format import ParseDict
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
document = json.load(open(sys.argv[1]))
Statement.copy_from_pb(ParseDict(document, statement_pb2.Statement())).validate()
ParseDict(document['predicate'], provenance_pb2.Provenance())
";

/// Fields that the specifications of statement and predicate demand and this one lacks.
fn lacks(statement: &Value) -> Vec<&'static str> {
    let is_uri = |value: &Value| {
        let scheme = value.as_str().and_then(|text| text.split_once(':'));
        scheme.is_some_and(|(scheme, rest)| !scheme.is_empty() && !rest.is_empty())
    };
    let predicate = &statement["predicate"];
    let definition = &predicate["buildDefinition"];
    let subjects = statement["subject"].as_array();
    let dependencies = definition["resolvedDependencies"].as_array();
    let has_digest = |resource: &Value| {
        let digests = resource["digest"].as_object();
        digests.is_some_and(|digests| {
            !digests.is_empty() && digests.values().all(|digest| digest.as_str() != Some(""))
        })
    };
    let all_have = |list: Option<&Vec<Value>>| {
        list.is_some_and(|list| !list.is_empty() && list.iter().all(has_digest))
    };
    let demanded = [
        (
            "_type",
            statement["_type"] == "https://in-toto.io/Statement/v1",
        ),
        ("subject", all_have(subjects)),
        (
            "predicateType",
            statement["predicateType"] == "https://slsa.dev/provenance/v1",
        ),
        ("buildType", is_uri(&definition["buildType"])),
        (
            "externalParameters",
            definition["externalParameters"].is_object(),
        ),
        ("resolvedDependencies", all_have(dependencies)),
        (
            "builder.id",
            is_uri(&predicate["runDetails"]["builder"]["id"]),
        ),
    ];
    demanded
        .into_iter()
        .filter(|(_, is_there)| !is_there)
        .map(|(name, _)| name)
        .collect()
}

/// Subjects whose file does not have the digest.
fn changed(statement: &Value, release: &Path) -> Vec<String> {
    let mut changed = Vec::new();
    for subject in statement["subject"].as_array().unwrap() {
        let name = subject["name"].as_str().unwrap();
        let output = Command::new("sha256sum")
            .arg(release.join(name))
            .output()
            .unwrap();
        let sum = crate::stdout(&output);
        if sum.split(' ').next() != subject["digest"]["sha256"].as_str() {
            changed.push(name.to_string());
        }
    }
    changed
}

#[test]
fn the_provenance_is_in_totos_and_has_the_digests_of_all_files() {
    let Some((checkout, release)) = released() else {
        return;
    };
    let path = release.join("provenance.json");
    let statement: Value = serde_json::from_str(&text(&path)).unwrap();
    assert_eq!(lacks(&statement), [""; 0], "{statement:#}");
    assert_eq!(changed(&statement, release), [""; 0]);
    let names: Vec<&str> = statement["subject"]
        .as_array()
        .unwrap()
        .iter()
        .map(|subject| subject["name"].as_str().unwrap())
        .collect();
    let sums = sums(release);
    let listed: Vec<&str> = sums.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!([&names[..], &["provenance.json"]].concat(), listed);

    let definition = &statement["predicate"]["buildDefinition"];
    let expected = json!({
        "architecture": std::env::consts::ARCH,
        "programs": ["kata-gpu-boot", "kata-gpu-init"],
        "maintainer": "A Releaser <releases@kata.test>",
    });
    assert_eq!(definition["externalParameters"], expected);
    assert_eq!(
        definition["internalParameters"]["sourceDateEpoch"].to_string(),
        super::EPOCH
    );
    let dependencies = &definition["resolvedDependencies"];
    assert_eq!(
        dependencies[0]["digest"]["gitCommit"],
        checkout.git("rev-parse HEAD")
    );
    let lock = super::printed("sha256sum", &["Cargo.lock"], &checkout.folder);
    assert_eq!(
        dependencies[1]["digest"]["sha256"],
        *lock.split(' ').next().unwrap()
    );
    let rustc = super::printed("rustc", &["-vV"], &checkout.folder);
    let hash = dependencies[2]["digest"]["gitCommit"].as_str().unwrap();
    assert!(rustc.contains(&format!("commit-hash: {hash}\n")), "{rustc}");

    // Negative controls: a key of each kind, and a changed byte of a file.
    let mut bad = statement.clone();
    bad["subject"][0]["digest"] = json!({});
    bad["predicate"]["buildDefinition"]["buildType"] = json!("release");
    bad["predicate"]["runDetails"] = json!({});
    assert_eq!(lacks(&bad), ["subject", "buildType", "builder.id"]);
    let copy = TempDir::new("release-provenance");
    for name in &names {
        std::fs::copy(release.join(name), copy.0.join(name)).unwrap();
    }
    let mut program = crate::bytes(copy.0.join("kata-gpu-init"));
    program[100] ^= 1;
    crate::write(copy.0.join("kata-gpu-init"), program);
    assert_eq!(changed(&statement, &copy.0), ["kata-gpu-init"]);

    let Some(python) = IN_TOTO.python() else {
        return;
    };
    let is_read = |path: &Path| {
        let mut command = Command::new(&python);
        command
            .args(["-c", READER])
            .arg(path)
            .output()
            .unwrap()
            .status
            .success()
    };
    assert!(is_read(&path));
    let mut bad = statement;
    bad["predicate"]["buildDefinition"]["sources"] = json!("an unknown key");
    crate::write(copy.0.join("bad.json"), bad.to_string());
    assert!(!is_read(&copy.0.join("bad.json")));
}
