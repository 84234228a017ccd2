//! The signature of a release before the programs that verify it.

use super::{Checkout, printed, run, sums};
use std::path::Path;

/// Commands that verify a release, as its page has them but for the paths of keys.
const VERIFY: [(&str, &str); 2] = [
    (
        "minisign",
        "minisign -Vm SHA256SUMS -p ../../minisign.pub && sha256sum --check --strict SHA256SUMS",
    ),
    (
        "ssh",
        "ssh-keygen -Y verify -n kata-gpu-init -f ../../signers -I releases \
        -s SHA256SUMS.sig <SHA256SUMS && sha256sum --check --strict SHA256SUMS",
    ),
];

#[test]
fn a_signed_release_is_verified_and_a_changed_one_is_not() {
    let Some(checkout) = Checkout::new("release-signed", "checkout") else {
        return;
    };
    let folder = checkout.folder.parent().unwrap();
    if crate::export::program("minisign").is_none() {
        return crate::skip("KATA_GPU_BUILT", "no minisign: tests/setup installs it");
    }
    printed(
        "minisign",
        &["-GW", "-p", "minisign.pub", "-s", "minisign.key"],
        folder,
    );
    printed(
        "ssh-keygen",
        &["-q", "-t", "ed25519", "-N", "", "-f", "ssh.key"],
        folder,
    );
    let public = crate::text(folder.join("ssh.key.pub"));
    crate::write(folder.join("signers"), format!("releases {public}"));
    for (way, verify) in VERIFY {
        let sign = format!("{way}:{way}.key");
        let release = checkout.release(way, &["--sign", &sign]).unwrap();
        assert!(
            sums(&release)
                .iter()
                .any(|(name, _)| name == "provenance.json")
        );
        let is_verified = |release: &Path| run("sh", &["-c", verify], release).status.success();
        assert!(is_verified(&release), "{way}");
        for name in ["kata-gpu-boot.oci.tar", "provenance.json", "SHA256SUMS"] {
            let path = release.join(name);
            let good = crate::bytes(&path);
            let mut bad = good.clone();
            bad[10] ^= 1;
            crate::write(&path, bad);
            assert!(!is_verified(&release), "{way}: {name} is changed");
            // Nor signed.
            let mut command = checkout.command("initrd/parts/sign");
            let again = command.arg(&sign).arg(&release).output().unwrap();
            assert!(
                !again.status.success(),
                "{way}: {name} is changed and signed"
            );
            crate::write(&path, good);
        }
        assert!(is_verified(&release), "{way}");
    }
}

#[test]
fn a_key_that_is_not_there_is_refused_before_anything_is_built() {
    let Some(checkout) = Checkout::new("release-no-key", "checkout") else {
        return;
    };
    for (sign, expected) in [
        ("minisign:no.key", "no.key: no such key"),
        ("ssh:no.key", "no.key: no such key"),
        ("pgp:key", "name a program and its key"),
        ("minisign:", "name a program and its key"),
    ] {
        let error = checkout.release("out", &["--sign", sign]).unwrap_err();
        assert!(error.contains(expected), "{sign}: {error}");
        assert!(
            !checkout.folder.parent().unwrap().join("out").exists(),
            "{sign}"
        );
    }
}
