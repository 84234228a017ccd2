//! A failure means that the guest's init links a crate that nobody decided on, that a program of
//! the guest has outgrown its budget, or that an HTTP client or TLS has come into a build.

use crate::project;
use crate::supply_chain::cargo;
use kata_gpu_wire::arch::Arch;

/// Direct dependencies of the guest's init. A new one is a decision, not an accident.
/// flate2, lzma-rust2 and ruzstd decompress kernel modules; all three are Rust alone. sha2, which
/// lzma-rust2 links anyway, is for `--version`.
const GUEST_DEPENDENCIES: &[&str] = &[
    "anyhow",
    "flate2",
    "humantime",
    "kata-gpu-wire",
    "lzma-rust2",
    "nix",
    "ruzstd",
    "serde",
    "serde_json",
    "sha2",
    "tokio",
    "tracing",
    "tracing-subscriber",
];
/// Budget of the init on x86-64, stripped; the file of all budgets has the same.
const INIT_BYTES_X86_64: u64 = 3_000_000;

#[test]
fn the_guest_links_what_it_is_allowed_to() {
    let words = "tree --frozen -p kata-gpu-init -e normal --depth 1 --prefix none --format {p}";
    let text = cargo(&words.split(' ').collect::<Vec<_>>());
    let mut dependencies: Vec<&str> = text
        .lines()
        .skip(1)
        .filter_map(|l| l.split(' ').next())
        .filter(|l| !l.is_empty())
        .collect();
    dependencies.sort_unstable();
    assert_eq!(dependencies, GUEST_DEPENDENCIES);
}

/// Program, architecture and bytes of each budget of a release, which `initrd/release` reads, too.
fn release_budgets() -> Vec<(String, String, u64)> {
    let text = crate::text(project().join("initrd/parts/budgets"));
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (words, reason) = line
                .split_once(" # ")
                .unwrap_or_else(|| panic!("{line}: no reason"));
            let words: Vec<&str> = words.split_whitespace().collect();
            assert!(words.len() == 3 && !reason.trim().is_empty(), "{line}");
            (words[0].into(), words[1].into(), words[2].parse().unwrap())
        })
        .collect()
}

#[test]
fn every_program_of_a_guest_has_a_budget() {
    let all = release_budgets();
    for program in ["kata-gpu-init", "kata-gpu-nvml"] {
        for arch in Arch::ALL {
            let its = all
                .iter()
                .filter(|(name, of, _)| name == program && of == arch.facts().name);
            assert_eq!(its.count(), 1, "{program} {arch}");
        }
    }
    assert!(
        all.contains(&("kata-gpu-init".into(), "x86_64".into(), INIT_BYTES_X86_64)),
        "{all:?}"
    );
}

#[test]
fn the_init_is_small() {
    for (program, arch, budget) in release_budgets()
        .into_iter()
        .filter(|(program, ..)| program == "kata-gpu-init")
    {
        let init = project()
            .join(format!("target/{arch}-unknown-linux-musl/release"))
            .join(program);
        let Ok(meta) = std::fs::metadata(&init) else {
            // The packages for arm64 guests cannot be had everywhere.
            let demanded_by = if arch == "x86_64" {
                "KATA_GPU_BUILT"
            } else {
                "REQUIRE_ARM64"
            };
            crate::skip(
                demanded_by,
                &format!("{} is not built (tests/run builds it)", init.display()),
            );
            continue;
        };
        assert!(
            meta.len() <= budget,
            "{} has {} bytes, the budget is {budget}",
            init.display(),
            meta.len()
        );
    }
}

/// Judges of specs, which may be hostile, cannot be made to fetch anything
/// (tests/no-network/README.md).
#[test]
fn no_http_client_and_no_tls_is_built() {
    let lock = crate::text(project().join("Cargo.lock"));
    let packages: Vec<&str> = lock
        .lines()
        .filter_map(|l| l.strip_prefix("name = \"")?.strip_suffix('"'))
        .collect();
    assert!(
        packages.contains(&"jsonschema"),
        "the list of packages was not read"
    );
    for other in [
        "hyper-rustls",
        "ring",
        "aws-lc-rs",
        "native-tls",
        "openssl-sys",
        "cc",
    ] {
        assert!(
            !packages.contains(&other),
            "{other} has come in: `cargo tree -i {other} --workspace --target all` says by whom"
        );
    }
}
