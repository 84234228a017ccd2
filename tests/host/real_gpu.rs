//! A failure means that the sources read the files of a real driver wrongly, or predict other
//! output than NVIDIA's programs gave on an H100 and an H200 (tests/fixtures/real-gpu).

use crate::collect::program;
use crate::{TempDir, golden, project, tree};
use kata_gpu_init::cdi::devices::Places;
use kata_gpu_init::cdi::spec::{Options, generate};
use kata_gpu_init::driver_files::{Roots, scan};
use kata_gpu_init::gpu::driver_proc::{parse_information, parse_majors, parse_node_rules};
use kata_gpu_tests::nvidia_programs::{same_as_nvidia_ctk, smi_lines};
use kata_gpu_wire::nvml_messages::Answer;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const MACHINES: [(&str, &str); 2] = [
    ("h100-580.159.04", "NVIDIA H100 80GB HBM3"),
    ("h200-580.159.04", "NVIDIA H200"),
];
const H200: &str = MACHINES[1].0;

fn recorded(machine: &str, name: &str) -> String {
    let path = project()
        .join("tests/fixtures/real-gpu")
        .join(machine)
        .join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[test]
fn the_drivers_files_on_real_machines_are_read() {
    for (machine, model) in MACHINES {
        let read = parse_information(&recorded(machine, "information")).unwrap();
        assert_eq!((read.minor, read.model.as_deref()), (0, Some(model)));
        assert!(read.uuid.unwrap().starts_with("GPU-"));
    }
    let majors = parse_majors(&recorded(H200, "devices"));
    assert_eq!((majors.nvidia, majors.uvm), (Some(195), Some(238)));
    let rules = parse_node_rules(&recorded(H200, "params"));
    assert_eq!((rules.mode, rules.gid), (0o666, 0));
    // The stand-in's text, which is that of 32 GPUs, whatever is there.
    let minors = tree::mig_minors();
    assert_eq!(
        (minors.len(), minors.lines().last()),
        (109_408, Some("gpu31/gi14/ci7/access 4322"))
    );
}

#[test]
fn a_real_nvml_answered_what_nvidia_smi_printed() {
    for (machine, _) in MACHINES {
        let answer: Answer = serde_json::from_str(&recorded(machine, "nvml-facts.json")).unwrap();
        let Answer::Facts(mut facts) = answer else {
            panic!("{machine}: no facts")
        };
        let smi = recorded(machine, "nvidia-smi.csv");
        assert_eq!(smi_lines(&facts), smi.lines().collect::<Vec<_>>());
        // Negative control.
        facts.devices[0].ecc = Some(false);
        assert_ne!(smi_lines(&facts), smi.lines().collect::<Vec<_>>());
    }
}

#[test]
fn the_spec_of_a_real_driver_is_that_of_nvidia_ctk() {
    const DRIVER_ROOT: &str = "/usr/local/nvidia";
    let folder = TempDir::new("real-driver-files");
    let skipped = tree::build(&folder.0, &recorded(H200, "root.tree"));
    if !skipped.is_empty() {
        println!("skipped: device nodes take root: {skipped:?}");
        return;
    }
    let found = Places {
        root: folder.0.clone(),
        dev_root: folder.0.clone(),
    }
    .gpus()
    .unwrap();
    let roots = Roots {
        root: folder.0.clone(),
        driver_root: DRIVER_ROOT.into(),
        ..Roots::default()
    };
    let files = scan(&roots, None).unwrap();
    let spec = generate(
        &found.gpus,
        &found.common,
        Some(&files),
        &Options::default(),
    );
    let ours: Value = serde_json::from_slice(&spec.to_json()).unwrap();
    let mut theirs: Value = serde_json::from_str(&recorded(H200, "nvidia-ctk.json")).unwrap();
    for device in ["0", "all"] {
        same_as_nvidia_ctk(&ours, &theirs, device, Path::new(DRIVER_ROOT)).unwrap();
    }
    // Negative control.
    theirs["containerEdits"]["mounts"]
        .as_array_mut()
        .unwrap()
        .retain(|m| !m["hostPath"].as_str().unwrap().contains("libcuda.so"));
    let error = same_as_nvidia_ctk(&ours, &theirs, "0", Path::new(DRIVER_ROOT))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("in ours alone [\"/usr/local/nvidia/lib64/libcuda.so.580.159.04\"]"),
        "{error}"
    );
}

/// Boots of the init beside a driver that was loaded, with a GPU that was bound, up to the program
/// of a container: one under the test agent that failed, one under kata-agent that computed.
#[test]
fn boots_on_real_gpus_have_their_golden_pages() {
    for boot in ["real-h200-xid", "real-h200-kata-agent"] {
        let file = |kind: &str| project().join(format!("tests/fixtures/boots/{boot}.{kind}"));
        let mut command = Command::new(program());
        command.arg("show").arg(file("ndjson"));
        if file("console").exists() {
            command.arg("--console").arg(file("console"));
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        golden(&format!("boots/{boot}.show.txt"), &crate::stdout(&output));
    }
}
