//! CID of a sandbox's VM by the command line of its QEMU: Kata's runtime-rs keeps it nowhere else.
//!
//! A command line is a claim. A claim counts if its process is of the user that owns Kata's file
//! about the sandbox ([`processes`]), and while no other claim has the same sandbox or CID: a false
//! claim takes a name from a boot at worst.

use crate::processes;
use std::collections::HashMap;
use std::path::Path;

/// Claims of the processes that run now, which are looked through once for each owner.
#[derive(Default)]
pub struct Claims(HashMap<u32, Vec<(String, u32)>>);

impl Claims {
    /// CID of a sandbox's VM. None where it has none, or its process cannot be seen, as from a
    /// process namespace of its own.
    pub fn cid_of(&mut self, proc: &Path, sandbox: &str, owner: u32) -> Option<u32> {
        let claims = || {
            processes::of_user(proc, owner)
                .iter()
                .filter_map(|(_, words)| claim(words))
                .collect()
        };
        choose(self.0.entry(owner).or_insert_with(claims), sandbox)
    }
}

/// CID of a VM by the command line of its QEMU.
pub fn cid(words: &[u8]) -> Option<u32> {
    name_and_cid(words).1
}

/// Name and CID of a VM by the command line of its QEMU, if it has both.
fn claim(words: &[u8]) -> Option<(String, u32)> {
    let (name, cid) = name_and_cid(words);
    Some((name?, cid?))
}

/// The same for words that end in a zero byte. One word is the guest's own command line, of which a
/// pod's annotations may choose a part.
fn name_and_cid(words: &[u8]) -> (Option<String>, Option<u32>) {
    let mut words = words
        .split(|byte| *byte == 0)
        .filter_map(|word| std::str::from_utf8(word).ok());
    let (mut name, mut cid) = (None, None);
    while let Some(word) = words.next() {
        match word {
            "-name" => {
                name = words
                    .next()
                    .and_then(|value| value.split(',').next()?.strip_prefix("sandbox-"))
            }
            "-device" => {
                let device = words
                    .next()
                    .filter(|device| device.starts_with("vhost-vsock-"));
                cid = device
                    .and_then(|device| {
                        device
                            .split(',')
                            .find_map(|option| option.strip_prefix("guest-cid="))
                    })
                    .or(cid);
            }
            _ => {}
        }
    }
    (
        name.map(str::to_string),
        cid.and_then(|cid| cid.parse().ok()),
    )
}

fn choose(claims: &[(String, u32)], sandbox: &str) -> Option<u32> {
    let mut of_it = claims.iter().filter(|(name, _)| name == sandbox);
    let (Some((_, cid)), None) = (of_it.next(), of_it.next()) else {
        return None;
    };
    (claims.iter().filter(|(_, other)| other == cid).count() == 1).then_some(*cid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;
    use std::fs;

    /// Command line by runtime-rs 4.1.0, shortened; Kata's Go runtime has more in the name.
    fn words(name: &str, cid: &str) -> Vec<u8> {
        let device = format!("vhost-vsock-pci,disable-modern=false,vhostfd=3,guest-cid={cid}");
        [
            "/usr/bin/qemu-system-x86_64",
            "-name",
            name,
            "-m",
            "2048M",
            "-device",
            &device,
            "-nographic",
        ]
        .join("\0")
        .into_bytes()
    }

    #[test]
    fn a_command_line_has_name_and_cid_of_the_vm() {
        assert_eq!(
            claim(&words("sandbox-0a1b", "1903452")),
            Some(("0a1b".into(), 1_903_452))
        );
        assert_eq!(
            claim(&words("sandbox-0a1b,debug-threads=on", "7")),
            Some(("0a1b".into(), 7))
        );
        for (name, cid) in [
            ("0a1b", "7"),
            ("sandbox-0a1b", "99999999999"),
            ("sandbox-0a1b", ""),
        ] {
            assert_eq!(claim(&words(name, cid)), None, "{name} {cid}");
        }
        for other in [
            &b""[..],
            b"\0\0",
            b"-name",
            b"grep\0guest-cid=7\0",
            b"\xff\0-name\0sandbox-x",
        ] {
            assert_eq!(claim(other), None, "{other:?}");
        }
    }

    #[test]
    fn a_name_that_two_processes_claim_is_not_used() {
        let of = |claims: &[(&str, u32)]| {
            choose(
                &claims
                    .iter()
                    .map(|(name, cid)| (name.to_string(), *cid))
                    .collect::<Vec<_>>(),
                "a",
            )
        };
        assert_eq!(of(&[("a", 7), ("b", 8)]), Some(7));
        // A false claim names another VM as this sandbox, or this VM as another sandbox.
        assert_eq!(of(&[("a", 7), ("b", 8), ("a", 8)]), None);
        assert_eq!(of(&[("a", 7), ("b", 8), ("c", 7)]), None);
        assert_eq!(of(&[("b", 7)]), None);
    }

    #[test]
    fn what_a_pod_chooses_of_its_guests_command_line_is_no_cid() {
        for name in ["sandbox-a", "sandbox-a,debug-threads=on"] {
            let of =
                |more: &[&str]| claim(&[&words(name, "7"), more.join("\0").as_bytes()].join(&0));
            let devices = "scsi-hd,serial=x,guest-cid=9";
            for more in [
                ["-append", "quiet x,guest-cid=9"],
                ["-append", "-device vhost-vsock-pci,guest-cid=9"],
                ["-device", devices],
            ] {
                assert_eq!(of(&more), Some(("a".into(), 7)), "{more:?}");
            }
        }
    }

    #[test]
    fn only_processes_of_the_sandboxs_owner_count() {
        let proc = temp_dir();
        let make = |name: &str, status: &str, words: Vec<u8>| {
            fs::create_dir(proc.path().join(name)).unwrap();
            fs::write(proc.path().join(name).join("status"), status).unwrap();
            fs::write(proc.path().join(name).join("cmdline"), words).unwrap();
        };
        let cid_of =
            |sandbox: &str, owner: u32| Claims::default().cid_of(proc.path(), sandbox, owner);
        make(
            "41",
            "Uid:\t7\t7\t7\t7\nNSpid:\t41\n",
            words("sandbox-a", "5"),
        );
        assert_eq!((cid_of("a", 7), cid_of("a", 8)), (Some(5), None));
        // A program of the owner that another user has started, and a process in a container:
        // neither takes the name away, nor gives one to a sandbox without a QEMU.
        for (pid, status) in [
            ("42", "Uid:\t1000\t7\t7\t7\nNSpid:\t42\n"),
            ("43", "Uid:\t7\t7\t7\t7\nNSpid:\t43\t1\n"),
        ] {
            make(
                pid,
                status,
                [words("sandbox-a", "9"), words("sandbox-b", "9")].join(&0),
            );
        }
        assert_eq!((cid_of("a", 7), cid_of("b", 7)), (Some(5), None));
        make(
            "44",
            "Uid:\t7\t7\t7\t7\nNSpid:\t44\n",
            words("sandbox-a", "9"),
        );
        assert_eq!(cid_of("a", 7), None);
    }

    #[test]
    fn processes_are_looked_through_once_for_many_sandboxes() {
        let proc = temp_dir();
        fs::create_dir(proc.path().join("41")).unwrap();
        fs::write(proc.path().join("41/status"), "Uid:\t7\t7\t7\t7\n").unwrap();
        fs::write(proc.path().join("41/cmdline"), words("sandbox-a", "5")).unwrap();
        let mut claims = Claims::default();
        assert_eq!(claims.cid_of(proc.path(), "b", 7), None);
        fs::remove_dir_all(proc.path().join("41")).unwrap();
        assert_eq!(claims.cid_of(proc.path(), "a", 7), Some(5), "as it was");
    }
}
