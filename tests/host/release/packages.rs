//! The packages of kata-gpu-boot before dpkg, rpm and lintian.

use super::{printed, released, run};
use crate::{TempDir, project, text};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The file of a release with this end.
fn file(release: &Path, end: &str) -> PathBuf {
    let name = crate::names(release)
        .into_iter()
        .find(|name| name.ends_with(end));
    release.join(name.unwrap_or_else(|| panic!("no {end} in {}", release.display())))
}

/// Unpacks the package of Debian: control files below DEBIAN.
fn unpacked(release: &Path, dir: &Path) {
    let deb = file(release, ".deb");
    printed("dpkg-deb", &["-R", deb.to_str().unwrap(), "."], dir);
}

/// Modes, owners and paths of a listing of `tar -tv` has.
fn listed(contents: &str) -> String {
    let line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        format!("{} {} {}\n", words[0], words[1], words[5..].join(" "))
    };
    contents.lines().map(line).collect()
}

#[test]
fn the_packages_hold_program_unit_manual_and_completions() {
    let Some((_, release)) = released() else {
        return;
    };
    let (deb, rpm) = (file(release, ".deb"), file(release, ".rpm"));
    let (deb, rpm) = (deb.to_str().unwrap(), rpm.to_str().unwrap());
    let mut all = listed(&printed("dpkg-deb", &["--contents", deb], release));
    for script in ["control", "postinst", "prerm", "postrm"] {
        let text = printed("dpkg-deb", &["--info", deb, script], release);
        all += &format!("\n== {script}\n{}", without_size(&text));
    }
    all += "\n== rpm\n";
    let files = "[%{FILEMODES:perms} %{FILEUSERNAME}/%{FILEGROUPNAME} %{FILENAMES} %{FILEFLAGS}\n]";
    let head = "%{NAME} %{VERSION} %{RELEASE} %{LICENSE} %{PACKAGER} %{BUILDHOST} %{BUILDTIME}\n";
    for words in [
        vec!["--qf", head],
        vec!["--qf", files],
        vec!["--scripts"],
        vec!["--suggests"],
    ] {
        all += &printed("rpm", &[&["-qp", rpm], &words[..]].concat(), release);
    }
    crate::golden("release/packages.txt", &all);
    let control = printed("dpkg-deb", &["--info", deb], release);
    assert!(!control.contains("conffiles"), "{control}");
}

/// The control file without Installed-Size and architecture, which are those of a build.
fn without_size(text: &str) -> String {
    let is_kept = |line: &&str| !line.starts_with("Installed-Size:") && !line.starts_with("Archit");
    text.lines()
        .filter(is_kept)
        .map(|line| format!("{line}\n"))
        .collect()
}

#[test]
fn both_packages_hold_what_the_program_prints_and_the_unit_that_starts_it() {
    let Some((_, release)) = released() else {
        return;
    };
    let (deb, rpm) = (TempDir::new("release-deb"), TempDir::new("release-rpm"));
    unpacked(release, &deb.0);
    let archive = file(release, ".rpm");
    printed(
        "sh",
        &[
            "-c",
            "rpm2cpio \"$0\" | cpio -id --quiet",
            archive.to_str().unwrap(),
        ],
        &rpm.0,
    );
    let man = TempDir::new("release-man");
    let boot = crate::collect::program();
    let boot = boot.to_str().unwrap();
    printed(boot, &["man", "."], &man.0);
    let unit = text(project().join("src/collect/deploy/kata-gpu-boot.service"));
    for (root, zsh) in [(&deb.0, "vendor-completions"), (&rpm.0, "site-functions")] {
        let program = crate::bytes(root.join("usr/bin/kata-gpu-boot"));
        assert!(program == crate::bytes(release.join("kata-gpu-boot")));
        let share = root.join("usr/share");
        for (shell, path) in [
            (
                "bash",
                "bash-completion/completions/kata-gpu-boot".to_string(),
            ),
            (
                "fish",
                "fish/vendor_completions.d/kata-gpu-boot.fish".to_string(),
            ),
            ("zsh", format!("zsh/{zsh}/_kata-gpu-boot")),
        ] {
            assert_eq!(
                text(share.join(path)),
                printed(boot, &["completions", shell], root)
            );
        }
        let pages = crate::names(&man.0);
        assert!(pages.len() > 10, "{pages:?}");
        assert_eq!(crate::names(share.join("man/man1")).len(), pages.len());
        for page in pages {
            let unzipped = printed("gzip", &["-cd", &format!("man/man1/{page}.gz")], &share);
            assert_eq!(unzipped, text(man.0.join(&page)), "{page}");
        }
        // The unit differs in the program's path, and in what its first line says to do with it.
        let packaged = text(root.join("usr/lib/systemd/system/kata-gpu-boot.service"));
        assert!(
            packaged.contains("\nExecStart=/usr/bin/kata-gpu-boot collect"),
            "{packaged}"
        );
        let below_first = |text: &str| text.split_once('\n').unwrap().1.to_string();
        assert_eq!(
            below_first(&packaged),
            below_first(&unit).replace("/usr/local/bin", "/usr/bin")
        );
        assert!(!packaged.contains("copy this file"), "{packaged}");
    }
}

/// A scriptlet with this argument list, on a machine where systemd runs: calls of systemctl.
fn calls(script: &str, arguments: &[&str]) -> Vec<String> {
    let dir = TempDir::new("release-scriptlet");
    let log = dir.0.join("log");
    crate::write(&log, "");
    // A unit that fails must not fail the installation.
    let systemctl = format!("#!/bin/sh\necho \"$*\" >>{}\nexit 1\n", log.display());
    crate::write(dir.0.join("systemctl"), systemctl);
    crate::chmod(dir.0.join("systemctl"), 0o755);
    let on = |systemd: &Path| {
        let script = script.replace("/run/systemd/system", systemd.to_str().unwrap());
        let path = format!("{}:{}", dir.0.display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("sh");
        command
            .args(["-ec", &script, "scriptlet"])
            .args(arguments)
            .env("PATH", path);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{script}: {output:?}");
    };
    on(&dir.0.join("no-systemd"));
    assert_eq!(text(&log), "", "without systemd");
    on(&dir.0);
    let calls = text(&log).lines().map(str::to_string).collect();
    fs::remove_dir_all(&dir.0).unwrap();
    calls
}

#[test]
fn an_installation_starts_nothing_an_upgrade_restarts_what_runs() {
    let Some((_, release)) = released() else {
        return;
    };
    let dir = TempDir::new("release-scripts");
    unpacked(release, &dir.0);
    let of_deb = |name: &str| text(dir.0.join("DEBIAN").join(name));
    let rpm = file(release, ".rpm");
    let of_rpm = |tag: &str| {
        printed(
            "rpm",
            &["-qp", "--qf", &format!("%{{{tag}}}"), rpm.to_str().unwrap()],
            release,
        )
    };
    let reload = "daemon-reload";
    let restart = "try-restart kata-gpu-boot.service";
    let stop = "--no-reload disable --now kata-gpu-boot.service";
    for (script, arguments, expected) in [
        (of_deb("postinst"), vec!["configure", ""], vec![reload]),
        (
            of_deb("postinst"),
            vec!["configure", "0.0.9-1"],
            vec![reload, restart],
        ),
        (of_deb("postinst"), vec!["abort-upgrade", "0.0.9-1"], vec![]),
        (of_deb("prerm"), vec!["upgrade", "0.2.0-1"], vec![]),
        (of_deb("prerm"), vec!["remove"], vec![stop]),
        (of_deb("postrm"), vec!["remove"], vec![reload]),
        (of_rpm("POSTIN"), vec!["1"], vec![reload]),
        (of_rpm("POSTIN"), vec!["2"], vec![reload, restart]),
        (of_rpm("PREUN"), vec!["1"], vec![]),
        (of_rpm("PREUN"), vec!["0"], vec![stop]),
        (of_rpm("POSTUN"), vec!["0"], vec![reload]),
    ] {
        assert_eq!(
            calls(&script, &arguments),
            expected,
            "{arguments:?} of {script}"
        );
    }
}

/// Errors and warnings of lintian.
fn faults(deb: &Path) -> Vec<String> {
    let folder = deb.parent().unwrap();
    let name = deb.file_name().unwrap().to_str().unwrap();
    let output = run("lintian", &["--no-cfg", "--allow-root", name], folder);
    let text = crate::stdout(&output);
    // A package of Debian itself closes the bug that asks for it.
    let is_fault = |line: &&str| !line.contains("initial-upload-closes-no-bugs");
    // The stand-in is linked by this machine's compiler as it is.
    let is_of_stand_in = |line: &&str| line.ends_with("[usr/bin/kata-gpu-boot]");
    let faults = text
        .lines()
        .filter(is_fault)
        .filter(|line| !is_of_stand_in(line));
    faults.map(str::to_string).collect()
}

#[test]
fn lintian_finds_no_fault_in_the_package() {
    let Some((_, release)) = released() else {
        return;
    };
    if crate::export::program("lintian").is_none() {
        return crate::skip("KATA_GPU_BUILT", "no lintian: tests/setup installs it");
    }
    assert_eq!(faults(&file(release, ".deb")), [""; 0]);
    // Negative control.
    let dir = TempDir::new("release-lintian");
    crate::make_dir(dir.0.join("root"));
    unpacked(release, &dir.0.join("root"));
    crate::remove(dir.0.join("root/usr/share/doc/kata-gpu-boot/copyright"));
    printed(
        "dpkg-deb",
        &["--root-owner-group", "--build", "root", "bad.deb"],
        &dir.0,
    );
    let found = faults(&dir.0.join("bad.deb"));
    assert!(
        found.iter().any(|line| line.contains("no-copyright-file")),
        "{found:?}"
    );
}
