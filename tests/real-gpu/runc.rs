//! A container of runc (or crun) with devices that the crate of kata-agent injects: a runtime that
//! is not ours, with cgroups that allow what the spec allows.

use crate::machine::{Machine, command};
use anyhow::{Context, Result, anyhow, ensure};
use kata_gpu_test_guest::agent::cdi::inject;
use kata_gpu_test_guest::agent::container_run::{PROGRAM, copy_tree};
use kata_gpu_test_support::temp_dir;
use oci_spec::runtime::Spec;
use std::path::Path;

/// Runs the CUDA program in a container with these devices of the specs in a directory. Returns its
/// output, whether or not it succeeds.
pub fn run(machine: &Machine, runtime: &Path, specs: &Path, devices: &[&str]) -> Result<String> {
    let scratch = temp_dir();
    let bundle = scratch.path();
    copy_tree(&machine.folder.program("root"), &bundle.join("rootfs"))?;
    let mut spec = Spec::default();
    if let Some(process) = spec.process_mut() {
        process
            .set_args(Some(vec![PROGRAM.into()]))
            .set_terminal(Some(false));
    }
    if let Some(root) = spec.root_mut() {
        root.set_path(bundle.join("rootfs"))
            .set_readonly(Some(false));
    }
    if !devices.is_empty() {
        let (specs, devices) = (
            specs.to_str().context("a path of specs")?,
            devices.iter().map(ToString::to_string).collect::<Vec<_>>(),
        );
        // One try.
        inject(
            kata_gpu_test_agent::specs,
            &mut spec,
            specs,
            &devices,
            0,
            true,
            &|_| (),
            &mut |_, _| (),
        )
        .map_err(|(_, error)| anyhow!("inject: {error}"))?;
    }
    spec.save(bundle.join("config.json"))?;
    let id = bundle.file_name().context("a bundle without a name")?;
    let output = command(runtime)
        .args(["run", "--bundle"])
        .arg(bundle)
        .arg(id)
        .output()
        .with_context(|| format!("start {}", runtime.display()))?;
    // A container may be left of a runtime that was killed.
    let _deleted = command(runtime)
        .args(["delete", "--force"])
        .arg(id)
        .output();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    // Without a line of the program, the container has not begun.
    let began = text
        .lines()
        .any(|line| line.starts_with("error=") || line.starts_with("gpus="));
    ensure!(
        began,
        "{} run: {}: {text}",
        runtime.display(),
        output.status
    );
    Ok(text)
}
