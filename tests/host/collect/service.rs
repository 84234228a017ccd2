//! A failure means that the collector keeps a right that it does not need, in any thread, or that
//! its systemd unit, DaemonSet or probe is not what systemd, Kubernetes and kustomize take.

use super::*;
use crate::fleet::deployed;
use crate::fleet::kustomize::lost_in_the_api;
use crate::stderr;
use serde_yaml::Value;

/// A field of each thread's /proc status.
fn of_threads(pid: u32, field: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let status = crate::text(task.unwrap().path().join("status"));
        let of = |name: &str| {
            status
                .lines()
                .find_map(|l| l.strip_prefix(name))
                .unwrap()
                .trim()
                .to_string()
        };
        found.push((of("Name:"), of(field)));
    }
    found
}

#[test]
fn it_gives_up_what_it_does_not_need_in_every_thread() {
    let dir = folder();
    let root = nix::unistd::geteuid().is_root();
    // A user that is nobody else here.
    let words = if root {
        &["--user", "64321:64322"][..]
    } else {
        &[]
    };
    let collector = Collector::start(&dir.0, words);
    let guest = Guest::start(1, socket(&dir.0, "v"));
    guest.push(10);
    until_stored(&dir.0, 1, 10);
    let pid = collector.pid();
    let all = |field: &str, wanted: &str| {
        for (thread, value) in of_threads(pid, field) {
            let mut words = value.split_whitespace();
            assert!(words.all(|word| word == wanted), "{thread} {field} {value}");
        }
    };
    const NOTHING: &str = "0000000000000000";
    all("NoNewPrivs:", "1");
    all("CapInh:", NOTHING);
    all("CapAmb:", NOTHING);
    // A thread drops what it inherited as the first thing that it does.
    until(
        "each thread with no more capabilities than it needs",
        || {
            let threads = of_threads(pid, "CapPrm:");
            let runs = |name: &&str| threads.iter().any(|(thread, _)| thread == name);
            let drops = |(thread, value): &(String, String)| {
                // The main thread has the program's name. CAP_DAC_OVERRIDE is bit 1.
                let most = if thread == "kata-gpu-boot" && root {
                    2
                } else {
                    0
                };
                u64::from_str_radix(value, 16) == Ok(most)
            };
            let names = ["arrivals", "streams", "boots-write", "boots-keep"];
            names.iter().all(runs) && threads.iter().all(drops)
        },
    );
    if !root {
        eprintln!("not tried here, where the tests do not run as root: --user, the bounding set");
        return;
    }
    all("CapBnd:", NOTHING);
    all("Uid:", "64321");
    all("Gid:", "64322");
    all("Groups:", "none");
    use std::os::unix::fs::MetadataExt;
    let meta = std::fs::metadata(boot_path(&dir.0, 1)).unwrap();
    assert_eq!(
        (meta.uid(), meta.gid(), meta.mode() & 0o777),
        (64321, 64322, 0o640)
    );
    collector.stop();
    assert!(
        !socket(&dir.0, "v").exists(),
        "it can still remove its socket"
    );
}

#[test]
fn a_directory_that_its_user_cannot_reach_is_refused_at_the_start() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: no root, so no --user");
        return;
    }
    let dir = folder();
    let home = dir.0.join("home");
    crate::make_dir(&home);
    let words = ["--user", "64321:64322"];
    crate::chmod(&home, 0o700);
    // Ends a collector that starts where it should not.
    let mut bounded = Command::new("timeout");
    bounded.arg(DEADLINE.as_secs().to_string()).arg(program());
    let output = Collector::add_words(bounded, &home, &words).output();
    let output = output.unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("home/boots as user 64321") && said.contains("chmod o+x"),
        "{said}"
    );
    // Negative control.
    crate::chmod(&home, 0o711);
    Collector::start(&home, &words).stop();
}

#[test]
fn threads_that_read_guests_are_confined_with_vsock_too() {
    let dir = folder();
    let mut command = Command::new(program());
    // The vsock listener alone; on a port that no collector uses.
    let port = (1 << 20) + std::process::id();
    command
        .args([
            "collect",
            "--no-vms",
            "--port",
            &port.to_string(),
            "--sandbox",
            "/nonexistent/*/x",
            "--dir",
        ])
        .arg(dir.0.join("boots"));
    if !Path::new("/dev/vsock").exists() {
        eprintln!("skipped: this kernel has no AF_VSOCK");
        let output = command.output().unwrap();
        assert!(
            stderr(&output).contains("modprobe vhost_vsock"),
            "{output:?}"
        );
        return;
    }
    let collector = Collector::of(&mut command);
    collector.wait_for(&format!("listening on vsock port {port}"));
    // A thread drops what it inherited as the first thing that it does.
    let others = |(thread, value): &(String, String)| {
        thread == "kata-gpu-boot" || u64::from_str_radix(value, 16) == Ok(0)
    };
    until("threads without capabilities", || {
        let threads = of_threads(collector.pid(), "CapPrm:");
        threads.len() >= 5 && threads.iter().all(others)
    });
    collector.stop();
}

#[test]
fn every_thread_forbids_itself_what_default_profiles_forbid() {
    let dir = folder();
    let collector = Collector::start(&dir.0, &[]);
    // Two filters, whatever was there before.
    let filters = |pid| of_threads(pid, "Seccomp_filters:");
    let own: u64 = filters(std::process::id())[0].1.parse().unwrap();
    for (thread, value) in filters(collector.pid()) {
        assert_eq!(value.parse(), Ok(own + 2), "{thread}");
    }
    collector.stop();
}

#[test]
fn the_check_succeeds_only_with_a_collector_that_receives() {
    let dir = folder();
    // Longer than the name of a socket may be.
    let long = TempDir::new(&"x".repeat(100));
    let check = |dir: &Path| {
        Command::new(program())
            .args(["collect", "--check", "--dir"])
            .arg(dir.join("boots"))
            .output()
            .unwrap()
    };
    let has_none = |dir: &Path| {
        let none = check(dir);
        assert_eq!(none.status.code(), Some(2), "{none:?}");
        assert!(
            stderr(&none).contains("does one run with this --dir?"),
            "{none:?}"
        );
    };
    for dir in [&dir.0, &long.0] {
        has_none(dir);
        crate::make_dir(dir.join("boots"));
        has_none(dir);
    }
    let uds = dir.0.join("v");
    for _ in 0..2 {
        // Killed, it leaves its socket, and the next one makes it anew.
        let collector = Collector::start(&dir.0, &[]);
        let well = check(&dir.0);
        assert!(well.status.success(), "{well:?}");
        collector.kill();
    }
    assert_eq!(check(&dir.0).status.code(), Some(2));
    let collector = Collector::start(&long.0, &["--uds", uds.to_str().unwrap()]);
    assert!(check(&long.0).status.success());
    let pid = nix::unistd::Pid::from_raw(collector.pid() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    let hangs = check(&long.0);
    assert_eq!(hangs.status.code(), Some(2));
    assert!(stderr(&hangs).contains("no answer within"), "{hangs:?}");
    collector.kill();
}

#[test]
fn the_systemd_unit_is_one_that_systemd_takes() {
    let unit = deployed("kata-gpu-boot.service");
    let program = program().canonicalize().unwrap();
    let unit = unit.replace("/usr/local/bin/kata-gpu-boot", program.to_str().unwrap());
    assert!(
        unit.contains(" collect --dir /var/lib/kata-gpu-boot\n"),
        "alerts name it"
    );
    for line in [
        "Type=notify",
        "Restart=always",
        "DynamicUser=yes",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=CAP_DAC_OVERRIDE",
    ] {
        assert!(unit.lines().any(|l| l == line), "{line}");
    }
    if Command::new("systemd-analyze")
        .arg("--version")
        .output()
        .is_err()
    {
        eprintln!("skipped: there is no systemd-analyze");
        return;
    }
    let dir = folder();
    let verify = |text: &str| {
        let path = dir.0.join("kata-gpu-boot.service");
        crate::write(&path, text);
        let output = Command::new("systemd-analyze")
            .arg("verify")
            .arg(&path)
            .output()
            .unwrap();
        let said = stderr(&output);
        (
            output.status.success() && !said.contains("kata-gpu-boot.service:"),
            said,
        )
    };
    let (good, said) = verify(&unit);
    assert!(good, "{said}");
    // Negative control: a wrong unit does not pass.
    assert!(!verify(&unit.replace("Type=notify", "Type=nonsense")).0);
}

#[test]
fn the_daemonset_says_what_the_collector_needs_and_no_more() {
    let set: Value = serde_yaml::from_str(&deployed("daemonset.yaml")).unwrap();
    let template = &set["spec"]["template"];
    assert_eq!(
        set["spec"]["selector"]["matchLabels"],
        template["metadata"]["labels"]
    );
    let pod = &template["spec"];
    let container = &pod["containers"][0];
    let words = |list: &Value| -> Vec<String> {
        let words = list.as_sequence().unwrap().iter();
        words
            .map(|word| word.as_str().unwrap().to_string())
            .collect()
    };
    assert_parses(&words(&container["command"]));
    let security = &container["securityContext"];
    let capabilities = &security["capabilities"];
    assert_eq!(words(&capabilities["drop"]), ["ALL"]);
    assert_eq!(
        words(&capabilities["add"]),
        ["CHOWN", "DAC_OVERRIDE", "SETGID", "SETPCAP", "SETUID"]
    );
    for (field, wanted) in [
        (&security["allowPrivilegeEscalation"], false),
        (&security["readOnlyRootFilesystem"], true),
        (&pod["automountServiceAccountToken"], false),
    ] {
        assert_eq!(*field, wanted);
    }
    // Every mount has its volume, and what is written to or watched is mounted.
    let volumes = pod["volumes"].as_sequence().unwrap();
    let mounts = container["volumeMounts"].as_sequence().unwrap();
    for mount in mounts {
        let volume = volumes.iter().find(|v| v["name"] == mount["name"]).unwrap();
        assert_eq!(volume["hostPath"]["path"], mount["mountPath"]);
    }
    for pattern in kata_gpu_collect::VM_SOCKETS {
        assert!(
            mounts
                .iter()
                .any(|m| pattern.starts_with(m["mountPath"].as_str().unwrap())),
            "{pattern} is not mounted"
        );
    }
    for pattern in kata_gpu_collect::sandbox_pod::BUNDLES {
        let mount = mounts
            .iter()
            .find(|m| pattern.starts_with(m["mountPath"].as_str().unwrap()))
            .unwrap_or_else(|| panic!("{pattern}"));
        assert_eq!(mount["readOnly"], true, "{pattern}");
    }
    for mount in mounts.iter().filter(|m| m["name"] != "boots") {
        assert_eq!(
            mount["mountPropagation"].as_str(),
            Some("HostToContainer"),
            "{mount:?}: other containers' mounts would be held"
        );
    }
    for probe in ["readinessProbe", "livenessProbe"] {
        let words = words(&container[probe]["exec"]["command"]);
        assert_eq!(words[1..3], ["collect", "--check"], "{probe}");
        assert_eq!(container["command"][2], words[3], "{probe}: another folder");
        assert_parses(&words);
        // Longer than the program's own deadline, so that its words are seen.
        assert!(
            container[probe]["timeoutSeconds"].as_u64() > Some(8),
            "{probe}"
        );
    }
}

/// Runs the command's words with `--help` behind them, as the kubelet fills them in: what does not
/// parse fails.
fn assert_parses(words: &[String]) {
    let words: Vec<String> = words
        .iter()
        .map(|word| word.replace("$(POD_IP)", "10.0.0.7"))
        .collect();
    let parses = |words: &[String]| {
        let output = Command::new(program()).args(words).arg("--help").output();
        output.unwrap().status.success()
    };
    assert!(parses(&words[1..]), "{words:?}");
    assert!(!parses(&["collect", "--no-such-option"].map(String::from)));
}

#[test]
fn kustomize_sets_the_image_of_the_daemonset() {
    let kustomization = deployed("kustomization.yaml");
    let set: Value = serde_yaml::from_str(&deployed("daemonset.yaml")).unwrap();
    let read: Value = serde_yaml::from_str(&kustomization).unwrap();
    let image = &read["images"][0];
    let container = &set["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(image["name"], container["image"]);
    assert_eq!(image["newTag"].as_str(), Some(env!("CARGO_PKG_VERSION")));
}

#[test]
fn the_daemonset_has_only_fields_of_the_kubernetes_api() {
    let manifest = deployed("daemonset.yaml");
    let lost = |manifest: &str| {
        serde_yaml::from_str(manifest).map_or(true, |set| lost_in_the_api(&set) != Some(Ok(())))
    };
    assert!(!lost(&manifest));
    for (good, bad) in [
        ("mountPropagation: HostTo", "mountPropagatoin: HostTo"),
        ("readOnlyRootFilesystem:", "readonlyRootFilesystem:"),
        ("failureThreshold: 4", "failureTreshold: 4"),
        (
            "rollingUpdate: {maxUnavailable",
            "rollingUpdate: {maxUnavailabe",
        ),
        ("periodSeconds: 30", "periodSeconds: soon"),
    ] {
        assert!(manifest.contains(good), "{good}");
        assert!(lost(&manifest.replace(good, bad)), "{bad}");
    }
}

#[test]
fn systemd_is_notified_when_guests_can_connect() {
    let dir = folder();
    let notify = std::os::unix::net::UnixDatagram::bind(dir.0.join("notify")).unwrap();
    notify.set_read_timeout(Some(DEADLINE)).unwrap();
    let mut command = Collector::command(&dir.0, &[]);
    let collector = Collector::of(command.env("NOTIFY_SOCKET", dir.0.join("notify")));
    let mut text = [0; 64];
    let n = notify.recv(&mut text).unwrap();
    assert_eq!(&text[..n], b"READY=1");
    Raw::connect(&socket(&dir.0, "v"));
    collector.stop();
}
