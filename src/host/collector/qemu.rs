//! CID of a sandbox's VM by the command line of its QEMU: Kata's runtime-rs keeps it nowhere else.
//!
//! Any process can have any command line. One counts whose user owns what Kata has written about the
//! sandbox, and only while no other such process claims the same sandbox or the same CID: a claim that
//! is not QEMU's takes a name from a boot at worst, and gives none.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Longest command line that is read: one of QEMU with 16 GPUs has some 10 kB.
const MAX_WORDS: u64 = 128 * 1024;

/// Looks through the processes of user `owner` in `proc`. None where the VM has no CID, or it cannot
/// be seen, as in a process namespace of its own.
pub fn cid_of(proc: &Path, sandbox: &str, owner: u32) -> Option<u32> {
    let is_process = |name: &str| name.bytes().all(|b| b.is_ascii_digit());
    let claims = fs::read_dir(proc).ok()?.filter_map(|entry| {
        let entry = entry.ok()?;
        let is_owners = || entry.metadata().is_ok_and(|metadata| metadata.uid() == owner);
        // A process may have ended in between.
        if !is_process(entry.file_name().to_str()?) || !is_owners() {
            return None;
        }
        let mut words = Vec::new();
        File::open(entry.path().join("cmdline")).ok()?.take(MAX_WORDS).read_to_end(&mut words).ok()?;
        claim(&words)
    });
    choose(&claims.collect::<Vec<_>>(), sandbox)
}

/// Name and CID of a VM by the command line of its QEMU, words that end in a zero byte. The guest's
/// own command line is one of the words, of which a pod's annotations may choose a part.
fn claim(words: &[u8]) -> Option<(String, u32)> {
    let mut words = words.split(|byte| *byte == 0).filter_map(|word| std::str::from_utf8(word).ok());
    let (mut name, mut cid) = (None, None);
    while let Some(word) = words.next() {
        match word {
            "-name" => name = words.next().and_then(|value| value.split(',').next()?.strip_prefix("sandbox-")),
            "-device" => {
                let device = words.next().filter(|device| device.starts_with("vhost-vsock-"));
                cid = device.and_then(|device| device.split(',').find_map(|option| option.strip_prefix("guest-cid="))).or(cid);
            }
            _ => {}
        }
    }
    Some((name?.to_string(), cid?.parse().ok()?))
}

fn choose(claims: &[(String, u32)], sandbox: &str) -> Option<u32> {
    let mut of_it = claims.iter().filter(|(name, _)| name == sandbox);
    let (Some((_, cid)), None) = (of_it.next(), of_it.next()) else { return None };
    (claims.iter().filter(|(_, other)| other == cid).count() == 1).then_some(*cid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::testing::TempDir;

    /// As runtime-rs 4.1.0 starts it, shortened; Kata's Go runtime has more in the name.
    fn words(name: &str, cid: &str) -> Vec<u8> {
        let device = format!("vhost-vsock-pci,disable-modern=false,vhostfd=3,guest-cid={cid}");
        ["/usr/bin/qemu-system-x86_64", "-name", name, "-m", "2048M", "-device", &device, "-nographic"].join("\0").into_bytes()
    }

    #[test]
    fn a_command_line_has_name_and_cid_of_the_vm() {
        assert_eq!(claim(&words("sandbox-0a1b", "1903452")), Some(("0a1b".into(), 1_903_452)));
        assert_eq!(claim(&words("sandbox-0a1b,debug-threads=on", "7")), Some(("0a1b".into(), 7)));
        for (name, cid) in [("0a1b", "7"), ("sandbox-0a1b", "99999999999"), ("sandbox-0a1b", "")] {
            assert_eq!(claim(&words(name, cid)), None, "{name} {cid}");
        }
        for other in [&b""[..], b"\0\0", b"-name", b"grep\0guest-cid=7\0", b"\xff\0-name\0sandbox-x"] {
            assert_eq!(claim(other), None, "{other:?}");
        }
    }

    #[test]
    fn what_two_processes_claim_is_nobodys() {
        let of = |claims: &[(&str, u32)]| choose(&claims.iter().map(|(name, cid)| (name.to_string(), *cid)).collect::<Vec<_>>(), "a");
        assert_eq!(of(&[("a", 7), ("b", 8)]), Some(7));
        // Somebody names another's VM as this sandbox, or this VM as his.
        assert_eq!(of(&[("a", 7), ("b", 8), ("a", 8)]), None);
        assert_eq!(of(&[("a", 7), ("b", 8), ("c", 7)]), None);
        assert_eq!(of(&[("b", 7)]), None);
    }

    #[test]
    fn what_a_pod_chooses_of_its_guests_command_line_is_no_cid() {
        for name in ["sandbox-a", "sandbox-a,debug-threads=on"] {
            let of = |more: &[&str]| claim(&[&words(name, "7"), more.join("\0").as_bytes()].join(&0));
            let devices = "scsi-hd,serial=x,guest-cid=9";
            for more in [["-append", "quiet x,guest-cid=9"], ["-append", "-device vhost-vsock-pci,guest-cid=9"], ["-device", devices]] {
                assert_eq!(of(&more), Some(("a".into(), 7)), "{more:?}");
            }
        }
    }

    #[test]
    fn only_processes_of_the_sandboxs_owner_count() {
        let proc = TempDir::new();
        let make = |name: &str, words: Vec<u8>| {
            fs::create_dir(proc.path().join(name)).unwrap();
            fs::write(proc.path().join(name).join("cmdline"), words).unwrap();
        };
        make("41", words("sandbox-a", "7"));
        make("self", words("sandbox-a", "8"));
        fs::create_dir(proc.path().join("42")).unwrap();
        let own = fs::metadata(proc.path()).unwrap().uid();
        assert_eq!(cid_of(proc.path(), "a", own), Some(7));
        assert_eq!(cid_of(proc.path(), "a", own + 1), None);
        make("43", words("sandbox-a", "9"));
        assert_eq!(cid_of(proc.path(), "a", own), None);
        assert_eq!(cid_of(&proc.path().join("none"), "a", own), None);
    }
}
