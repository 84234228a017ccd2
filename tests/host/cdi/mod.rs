//! The CDI spec: what is generated, what `cdi check` says of it, and the crates that agents read it
//! with.

mod beside;
mod check;
mod driver_roots;
pub mod generate;
mod oracle;
mod publications;
mod schema;

/// Names of the odd roots, of which each has its description.
fn odd_roots() -> Vec<String> {
    let names = crate::names(crate::project().join("tests/fixtures/cdi/roots"));
    names.iter().map(|name| name.replace(".tree", "")).collect()
}

/// An odd root's place in the guest: its driver root and its /dev.
fn odd_place(name: &str) -> (&'static str, &'static str) {
    match name {
        "flat-lib" => ("/home/driver", "/"),
        "split-driver-root" => ("/run/nvidia/driver", "/devices"),
        "nixos" => ("/run/opengl-driver", "/"),
        "extension-disk" => ("/run/kata-extensions/gpu", "/"),
        _ => ("/", "/"),
    }
}
