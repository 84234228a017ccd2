//! What the guest may link and weigh, and what the README promises.

use crate::project;
use std::process::Command;

/// Direct dependencies of the guest's init. A new one is a decision, not an accident.
/// flate2, lzma-rust2 and ruzstd decompress kernel modules; all three are Rust alone.
const GUEST_DEPENDENCIES: &[&str] =
    &["anyhow", "flate2", "humantime", "lzma-rust2", "nix", "ruzstd", "serde", "serde_json", "tokio", "tracing", "tracing-subscriber"];
/// 3 MB, stripped.
const INIT_BYTES: u64 = 3 * 1000 * 1000;

#[test]
fn the_guest_links_what_it_is_allowed_to() {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "-p", "kata-gpu-init", "-e", "normal", "--depth", "1", "--prefix", "none", "--format", "{p}"])
        .current_dir(project())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut dependencies: Vec<&str> = text.lines().skip(1).filter_map(|l| l.split(' ').next()).filter(|l| !l.is_empty()).collect();
    dependencies.sort_unstable();
    assert_eq!(dependencies, GUEST_DEPENDENCIES);
}

#[test]
fn the_init_is_small() {
    let init = project().join("target/x86_64-unknown-linux-musl/release/kata-gpu-init");
    let Ok(meta) = std::fs::metadata(&init) else {
        assert!(std::env::var_os("KATA_GPU_BUILT").is_none(), "{} is not built", init.display());
        return eprintln!("skipped: {} is not built (tests/run builds it)", init.display());
    };
    assert!(meta.len() <= INIT_BYTES, "{} has {} bytes, the budget is {INIT_BYTES}", init.display(), meta.len());
}

/// 8 MB as it is stored compressed. Plain it is larger by the test agent, whose crates bring an HTTP client and TLS that no guest of ours uses.
const SIM_BYTES: u64 = 8 * 1000 * 1000;
/// What is ours in it, plain: the init, modules, lists.
const SIM_WITHOUT_AGENT_BYTES: u64 = 3 * 1000 * 1000;

#[test]
#[cfg(feature = "host")]
fn the_simulators_initrd_is_small() {
    use kata_gpu_init::host::initrd::image::{Form, Image};
    use kata_gpu_init::host::initrd::output::Output;
    use std::io::Write;
    let path = project().join("target/initrd.cpio");
    let Ok(bytes) = std::fs::read(&path) else {
        assert!(std::env::var_os("KATA_GPU_BUILT").is_none(), "{} is not built", path.display());
        return eprintln!("skipped: {} is not built (tests/run builds it)", path.display());
    };
    let dir = crate::TempDir::new("sim-size");
    let mut output = Output::create(&dir.0.join("gzip"), Form::Gzip).unwrap();
    output.write_all(&bytes).unwrap();
    let gzip = output.end().unwrap().bytes;
    assert!(gzip <= SIM_BYTES, "the simulator's initrd has {gzip} bytes with gzip, the budget is {SIM_BYTES}");
    let image = Image::open(&path).unwrap();
    let agent: u64 = image.entries.iter().filter(|e| e.name.ends_with(b"kata-agent")).map(|e| e.data.length).sum();
    let ours = bytes.len() as u64 - agent;
    assert!(agent > 0 && ours <= SIM_WITHOUT_AGENT_BYTES, "{ours} bytes without the agent, the budget is {SIM_WITHOUT_AGENT_BYTES}");
}

#[test]
fn the_readme_has_the_table_of_parameters_that_the_code_prints() {
    let readme = std::fs::read_to_string(project().join("README.md")).unwrap();
    let table = kata_gpu_init::config::parameters_markdown();
    assert!(readme.contains(&table), "the README's table of parameters is not what `kata-gpu-init parameters` prints:\n{table}");
}

#[test]
fn every_script_the_readme_names_is_there() {
    let readme = std::fs::read_to_string(project().join("README.md")).unwrap();
    for script in ["initrd/demo", "tests/run", "tests/bench/run", "initrd/setup", "initrd/pack"] {
        assert!(readme.contains(script), "the README does not name {script}");
        let meta = std::fs::metadata(project().join(script)).unwrap_or_else(|e| panic!("{script}: {e}"));
        assert!(std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o111 != 0, "{script} is not executable");
    }
}
