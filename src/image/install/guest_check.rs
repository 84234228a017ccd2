//! Check of the initrd or image given to `install`: the report of `image verify`, against the
//! kernel and the driver's root that the configuration names. A guest that cannot boot is refused
//! with that report's errors.
//!
//! Not here: the requirements on an image; see [`crate::images::verify`].

use crate::images::disk_image;
pub use crate::images::image::Form;
use crate::images::image::{DISK, Image};
use crate::images::kernel_release;
use crate::images::unpacked_root::Tree;
use crate::images::verify;
use crate::images::verify::image_rules::Finding;
use crate::images::verify::{INIT, INIT_OF_DISK, Question, Report};
use crate::kata::refusal::Refusal;
use anyhow::{Context, Result, ensure};
use kata_gpu_report::severity::Severity;
use std::path::{Path, PathBuf};

/// Shown refusals of one rule; further ones are counted.
const SHOWN_OF_A_RULE: usize = 3;

/// The kernel that boots the initrd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// The configuration names no kernel.
    Unnamed,
    Release(PathBuf, String),
    /// Reason why the kernel's release is unknown.
    Unknown(String),
}

/// Demands of the configuration and the caller on a guest.
#[derive(Clone, Debug, Default)]
pub struct Wanted<'a> {
    /// Path of the kernel.
    pub kernel: Option<&'a str>,
    /// The driver's user space must be in the guest.
    pub user_space: bool,
    /// The driver's root, of the kernel command line.
    pub driver_root: Option<PathBuf>,
}

/// A readable initrd or image.
#[derive(Debug)]
pub struct Verified {
    pub kernel: Kernel,
    pub report: Report,
}

impl Wanted<'_> {
    fn check(&self, init: &str, image: &Image) -> Result<Verified> {
        let kernel = kernel_of(self.kernel);
        let release = match &kernel {
            Kernel::Release(_, release) => Some(release.clone()),
            Kernel::Unnamed | Kernel::Unknown(_) => None,
        };
        let question = Question {
            release,
            init: init.into(),
            user_space: self.user_space,
            driver_root: self.driver_root.clone(),
            ..Question::default()
        };
        let report = verify::check(image, &Tree::new(image)?, &question);
        Ok(Verified { kernel, report })
    }
}

/// Reads and verifies the root of a disk image. Error: why its files cannot be read.
pub fn look_into_disk(path: &Path, wanted: &Wanted) -> Result<Verified, String> {
    let read = || {
        let root = disk_image::read_disk(path)?.context("it is no disk")?;
        ensure!(
            !root.compressed,
            "its files are compressed: make it without -z of mkfs.erofs"
        );
        wanted.check(INIT_OF_DISK, &root.image)
    };
    read().map_err(|error| without_name(&error).join(": "))
}

/// Reasons of an error. Both its outermost context and a refusal name the file.
fn without_name(error: &anyhow::Error) -> Vec<String> {
    let has_more = error.chain().count() > 1;
    let reasons = error.chain().skip(usize::from(has_more));
    reasons.map(ToString::to_string).collect()
}

/// Reads and verifies an initrd. Errors: the file is no initrd at all.
pub fn look(path: &Path, wanted: &Wanted) -> Result<Verified, Refusal> {
    let read = || wanted.check(INIT, &Image::open(path)?);
    read().map_err(|error| {
        let reasons = without_name(&error);
        Refusal::at(
            path,
            format!("is not an initrd for Kata: {}", reasons.join(": ")),
        )
        .cure(if reasons.iter().any(|reason| reason.contains(DISK)) {
            "give it with --image"
        } else {
            "build one as newc cpio, plain or with gzip"
        })
    })
}

fn kernel_of(path: Option<&str>) -> Kernel {
    let Some(path) = path.filter(|path| !path.is_empty()) else {
        return Kernel::Unnamed;
    };
    if !Path::new(path).exists() {
        return Kernel::Unknown(format!("{path}: not there"));
    }
    match kernel_release::release(path) {
        Ok(release) => Kernel::Release(path.into(), release),
        Err(error) => Kernel::Unknown(format!("{error:#}")),
    }
}

impl Verified {
    /// Everything that keeps the guest from booting with GPUs.
    pub fn refusals(&self, path: &Path) -> Vec<Refusal> {
        let errors: Vec<&Finding> = self
            .report
            .findings
            .iter()
            .filter(|f| f.rule.severity == Severity::Error)
            .collect();
        let mut refusals = Vec::new();
        for of_rule in errors.chunk_by(|a, b| a.rule == b.rule) {
            let shown = of_rule.iter().take(SHOWN_OF_A_RULE);
            refusals.extend(shown.map(|finding| {
                Refusal {
                    what: format!("{} {}", finding.rule.name, finding.place()),
                    ..Refusal::at(path, finding.rule.breaks)
                        .cure(finding.rule.cure)
                        .forcible()
                }
            }));
            let more = of_rule.len().saturating_sub(SHOWN_OF_A_RULE);
            if let Some(last) = refusals.last_mut().filter(|_| more > 0) {
                last.what.push_str(&format!(
                    " ({more} more of these: `kata-gpu-boot image verify` has all)"
                ));
            }
        }
        refusals
    }

    /// Line of the text report: an initrd, and the verification's counts.
    pub fn shown(&self, path: &Path) -> String {
        let mib = self.report.bytes as f64 / f64::from(1 << 20);
        format!(
            "{}, {mib:.1} MiB, {}, verified: {}",
            path.display(),
            self.report.form.name(),
            self.report.counts()
        )
    }

    /// Line of the text report: the kernel that the modules were checked against.
    pub fn shown_kernel(&self) -> String {
        match &self.kernel {
            Kernel::Unnamed => {
                "not named in the configuration, so the modules were not held against it".into()
            }
            Kernel::Release(path, release) => format!("{}, {release}", path.display()),
            Kernel::Unknown(why) => format!("{why}, so the modules were not held against it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::images::newc::{Header, write_entry, write_trailer};
    use kata_gpu_test_support::elf_stand_in as stand_in;
    use kata_gpu_test_support::temp_dir;

    fn newc(files: &[(&str, &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        for (name, data) in files {
            let header = Header {
                mode: 0o100_755,
                nlink: 1,
                size: data.len() as u32,
                ..Header::default()
            };
            write_entry(&mut out, &header, name.as_bytes(), &mut &**data).unwrap();
        }
        write_trailer(&mut out).unwrap();
        out
    }

    #[test]
    fn what_is_no_initrd_is_refused_and_what_is_one_is_verified() {
        let dir = temp_dir();
        let path = dir.path().join("initrd");
        let of = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            look(&path, &Wanted::default())
        };
        let good = newc(&[("init", &stand_in::library(None, &[]))]);
        for (name, bytes, why) in [
            ("empty", b"".as_slice(), "it is empty"),
            ("cut in a header", &good[..60], "cut"),
            ("zstd", &[0x28, 0xb5, 0x2f, 0xfd, 0, 0, 0, 0], "zstd"),
            (
                "ELF",
                b"\x7fELF\x02\x01\x01\x00",
                "it is a program: not an initrd",
            ),
            ("cut gzip", &[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 1], "gzip"),
        ] {
            let refusal = of(bytes).unwrap_err();
            assert!(
                refusal.why.contains(why)
                    && !refusal.why.contains("initrd\":")
                    && !refusal.forcible,
                "{name}: {refusal}"
            );
        }
        let initrd = of(&good).unwrap();
        assert_eq!(
            (
                initrd.kernel.clone(),
                initrd.report.form,
                initrd.report.bytes
            ),
            (Kernel::Unnamed, Form::Plain, good.len() as u64)
        );
        let refused: Vec<String> = initrd
            .refusals(&path)
            .iter()
            .map(ToString::to_string)
            .collect();
        // Without any part of a driver it is an image whose driver comes on a disk of its own.
        assert_eq!(refused.len(), 1, "no agent: {refused:?}");
        assert!(
            refused[0].contains(
                "initrd: no-agent /usr/bin/kata-agent: the init has nothing to hand PID 1 to"
            ),
            "{refused:?}"
        );
        assert!(
            refused.iter().all(|line| line.ends_with("(or --force)")),
            "{refused:?}"
        );
    }

    #[test]
    fn of_many_errors_of_one_rule_the_rest_is_counted() {
        let dir = temp_dir();
        let path = dir.path().join("initrd");
        let (module, names) = (
            stand_in::module(b"vermagic=5.0 \0"),
            ["a", "b", "c", "d", "e"],
        );
        let files: Vec<String> = names
            .iter()
            .map(|name| format!("lib/modules/6.1/{name}.ko"))
            .collect();
        let dep: String = names.iter().map(|name| format!("{name}.ko:\n")).collect();
        let mut all: Vec<(&str, &[u8])> = vec![("lib/modules/6.1/modules.dep", dep.as_bytes())];
        all.extend(files.iter().map(|file| (file.as_str(), module.as_slice())));
        let mut archive = Vec::new();
        for directory in ["lib", "lib/modules", "lib/modules/6.1"] {
            let header = Header {
                mode: 0o040_755,
                nlink: 2,
                ..Header::default()
            };
            write_entry(
                &mut archive,
                &header,
                directory.as_bytes(),
                &mut std::io::empty(),
            )
            .unwrap();
        }
        archive.extend(newc(&all));
        std::fs::write(&path, archive).unwrap();
        let wanted = Wanted {
            kernel: Some("/nowhere/vmlinux"),
            ..Wanted::default()
        };
        let refusals = look(&path, &wanted).unwrap().refusals(&path);
        let of_rule: Vec<_> = refusals
            .iter()
            .filter(|r| r.what.starts_with("vermagic"))
            .collect();
        assert_eq!(of_rule.len(), 3);
        assert!(
            of_rule[2]
                .what
                .ends_with("(2 more of these: `kata-gpu-boot image verify` has all)"),
            "{}",
            of_rule[2]
        );
    }

    #[test]
    fn a_configurations_kernel_counts_where_its_release_is_readable() {
        let dir = temp_dir();
        let path = dir.path().join("vmlinux");
        std::fs::write(&path, b"...Linux version 6.18.5-nvidia-gpu (builder) #1").unwrap();
        assert_eq!(
            kernel_of(path.to_str()),
            Kernel::Release(path.clone(), "6.18.5-nvidia-gpu".into())
        );
        std::fs::write(&path, b"nothing").unwrap();
        assert!(matches!(
            kernel_of(path.to_str()),
            Kernel::Unknown(why) if why.contains("give the release itself")
        ));
        assert!(matches!(
            kernel_of(Some("/nowhere/6.1.0")),
            Kernel::Unknown(why) if why == "/nowhere/6.1.0: not there"
        ));
        assert_eq!(kernel_of(Some("")), Kernel::Unnamed);
    }
}
