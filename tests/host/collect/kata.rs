//! A failure means that the collector misses a VM of Kata's directories, names a boot after another
//! pod, opens a socket to another user, or lets a hostile peer fill its log.

use super::*;
use crate::{make_dir, remove, write};
use kata_gpu_report::data::boot_file::Sandbox;
use nix::unistd::geteuid;
use std::os::unix::net::UnixListener;

/// Kata's directories below one of our own.
struct Kata {
    dir: TempDir,
}

impl Kata {
    fn new() -> Self {
        Self { dir: folder() }
    }

    fn words(&self) -> Vec<String> {
        let at = |path: &str| format!("{}/{path}", self.dir.0.display());
        let mut words = Vec::new();
        for pattern in ["vc/vm/*/clh.sock", "k/*/root/kata.hvsock"] {
            words.extend(["--vm".to_string(), at(pattern)]);
        }
        for pattern in ["bundles/*/config.json", "crio/*/userdata/config.json"] {
            words.extend(["--bundle".to_string(), at(pattern)]);
        }
        words.extend(["--sandbox".to_string(), at("vc/sbs/*/persist.json")]);
        words
    }

    fn collector(&self, more: &[&str]) -> Collector {
        let words = self.words();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Collector::start(&self.dir.0, &[&words, more].concat())
    }

    /// A pod's sandbox, as its runtime's bundle describes it.
    fn bundle(&self, folder: &str, annotations: serde_json::Value) {
        let path = self.dir.0.join(folder).join("config.json");
        make_dir(path.parent().unwrap());
        let text = serde_json::json!({ "annotations": annotations }).to_string();
        write(path, text);
    }

    /// A VMM's listener, with the collector's socket next to it.
    fn served(&self, path: &str) -> UnixListener {
        let vmm = self.vmm(path);
        until("the socket of a VM", || self.socket(path).exists());
        vmm
    }

    /// A VMM makes its socket.
    fn vmm(&self, path: &str) -> UnixListener {
        let path = self.dir.0.join(path);
        make_dir(path.parent().unwrap());
        UnixListener::bind(path).unwrap()
    }

    fn socket(&self, path: &str) -> PathBuf {
        self.dir.0.join(format!("{path}_{DEFAULT_PORT}"))
    }
}

fn sandboxes(file: &BootFile) -> Vec<Sandbox> {
    file.host
        .iter()
        .filter_map(|l| {
            if let HostEvent::Sandbox(s) = &l.event {
                Some(s.clone())
            } else {
                None
            }
        })
        .collect()
}

#[test]
fn a_vms_socket_comes_and_goes_with_that_of_the_vmm() {
    let kata = Kata::new();
    // One that was there before the collector, in a root that is, and one in a root that is not
    // there yet.
    let _old = kata.vmm("vc/vm/old/clh.sock");
    let collector = kata.collector(&[]);
    let _new = kata.vmm("k/new/root/kata.hvsock");
    for (boot, vmm) in [(1, "vc/vm/old/clh.sock"), (2, "k/new/root/kata.hvsock")] {
        until("the socket of a VM", || kata.socket(vmm).exists());
        let guest = Guest::start(boot, kata.socket(vmm));
        guest.push(20);
        until_stored(&kata.dir.0, boot, 20);
        drop(guest);
    }
    for (boot, id) in [(1, "old"), (2, "new")] {
        let named = Sandbox {
            id: id.into(),
            vmm_user: Some(geteuid().as_raw()),
            ..Sandbox::default()
        };
        assert_eq!(sandboxes(&read(&kata.dir.0, boot)), [named]);
    }
    // The VMM makes its socket anew, then Kata removes the VM.
    remove(kata.dir.0.join("vc/vm/old/clh.sock"));
    until("our socket goes", || {
        !kata.socket("vc/vm/old/clh.sock").exists()
    });
    let _again = kata.vmm("vc/vm/old/clh.sock");
    until("our socket comes again", || {
        UnixStream::connect(kata.socket("vc/vm/old/clh.sock")).is_ok()
    });
    std::fs::remove_dir_all(kata.dir.0.join("k")).unwrap();
    let _back = kata.vmm("k/new/root/kata.hvsock");
    until("a root that comes again", || {
        UnixStream::connect(kata.socket("k/new/root/kata.hvsock")).is_ok()
    });
    let said = collector.stop();
    assert!(!kata.socket("vc/vm/old/clh.sock").exists());
    assert!(
        said.iter()
            .all(|l| !l.contains("remove ") && !l.contains("in use")),
        "{said:?}"
    );
}

#[test]
fn a_boot_is_named_by_its_pod_even_if_the_name_comes_late() {
    let kata = Kata::new();
    for (id, pod) in [("one", "train-0"), ("two", "\u{1b}[2Jevil")] {
        let annotations = serde_json::json!({
        "io.kubernetes.cri.sandbox-name": pod,
        "io.kubernetes.cri.sandbox-namespace": "ml",
        });
        kata.bundle(&format!("bundles/{id}"), annotations);
    }
    let _collector = kata.collector(&[]);
    for (boot, id) in [(1, "one"), (2, "two")] {
        let vmm = format!("vc/vm/{id}/clh.sock");
        let _vmm = kata.served(&vmm);
        let guest = Guest::start(boot, kata.socket(&vmm));
        guest.push(1);
        until_stored(&kata.dir.0, boot, 1);
    }
    let one = Sandbox {
        id: "one".into(),
        pod: Some("train-0".into()),
        namespace: Some("ml".into()),
        uid: None,
        vmm_user: Some(geteuid().as_raw()),
    };
    assert_eq!(sandboxes(&read(&kata.dir.0, 1)), [one]);
    for (n, parts) in [
        (1, [" (pod ml/train-0)\n", ", sandbox one\n"]),
        (2, [" (pod ml/\\x1b[2Jevil)\n", ", sandbox two\n"]),
    ] {
        let shown = shown(&kata.dir.0, n, &[]);
        assert!(parts.iter().all(|part| shown.contains(part)), "{shown}");
    }
}

#[test]
fn a_pods_annotations_name_no_other_pod_in_file_or_trace() {
    let kata = Kata::new();
    // As CRI-O writes it for tenant-b/evil-pod: its own, the pod's over them, the kubelet's labels
    // over those.
    let annotations = serde_json::json!({
        "io.kubernetes.cri-o.KubeName": "payroll-db-0",
        "io.kubernetes.cri-o.Namespace": "finance",
        "io.kubernetes.cri.sandbox-name": "payroll-db-0",
        "io.kubernetes.cri.sandbox-namespace": "finance",
        "io.kubernetes.cri.sandbox-uid": "6666",
        "io.kubernetes.pod.name": "evil-pod",
        "io.kubernetes.pod.namespace": "tenant-b",
        "io.kubernetes.pod.uid": "8b5e",
    });
    kata.bundle("crio/one/userdata", annotations);
    let _collector = kata.collector(&[]);
    let _vmm = kata.served("k/one/root/kata.hvsock");
    let recorded = crate::fleet::recorded(crate::fleet::RECORDED, 1);
    Raw::connect(&kata.socket("k/one/root/kata.hvsock")).say(recorded);
    until_settled(&kata.dir.0, 1);
    let names = [
        ("pod", "evil-pod"),
        ("namespace", "tenant-b"),
        ("uid", "8b5e"),
    ];
    let [pod, namespace, uid] = names.map(|(_, name)| Some(name.to_string()));
    assert_eq!(
        sandboxes(&read(&kata.dir.0, 1)),
        [Sandbox {
            id: "one".into(),
            pod,
            namespace,
            uid,
            vmm_user: Some(geteuid().as_raw()),
        }]
    );
    let exported = shown(&kata.dir.0, 1, &["--otlp"]);
    for (_, name) in names {
        assert!(exported.contains(&format!("\"{name}\"")), "{name}");
    }
    assert!(!exported.contains("payroll") && !exported.contains("finance"));
}

#[test]
fn vms_above_the_limit_are_named_and_the_others_served() {
    let kata = Kata::new();
    let _one = kata.vmm("vc/vm/one/clh.sock");
    let collector = kata.collector(&["--limit", "vms=1"]);
    until("the socket of a VM", || {
        kata.socket("vc/vm/one/clh.sock").exists()
    });
    let _two = kata.vmm("vc/vm/two/clh.sock");
    collector.wait_for("VM two: there are 1 already (limit vms)");
    assert!(!kata.socket("vc/vm/two/clh.sock").exists());
    let guest = Guest::start(1, kata.socket("vc/vm/one/clh.sock"));
    guest.push(5);
    until_stored(&kata.dir.0, 1, 5);
}

#[test]
fn only_a_socket_in_a_vms_directory_is_open_to_another_user() {
    use std::os::unix::fs::PermissionsExt;
    let kata = Kata::new();
    let _vmm = kata.vmm("vc/vm/one/clh.sock");
    let uds = kata.dir.0.join("u");
    let _collector = kata.collector(&["--uds", uds.to_str().unwrap()]);
    until("the socket of a VM", || {
        kata.socket("vc/vm/one/clh.sock").exists()
    });
    let mode = |path: PathBuf| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(
        (
            mode(kata.socket("vc/vm/one/clh.sock")),
            mode(kata.socket("u")),
            mode(kata.dir.0.join("boots"))
        ),
        (0o666, 0o660, 0o750)
    );
}

#[test]
fn a_hostile_peer_fills_no_log_and_hides_no_other_line() {
    let kata = Kata::new();
    let collector = kata.collector(&["--limit", "connects=100000"]);
    // A file in the way of the collector's socket is no socket: a line each time that the VMM makes
    // its own.
    let blocked = |path: &str| {
        make_dir(kata.dir.0.join(path).parent().unwrap());
        write(kata.socket(path), "");
    };
    blocked("vc/vm/loud/clh.sock");
    for _ in 0..200 {
        let vmm = kata.vmm("vc/vm/loud/clh.sock");
        std::thread::sleep(LOOK);
        drop(vmm);
        remove(kata.dir.0.join("vc/vm/loud/clh.sock"));
    }
    // A guest that connects and leaves, connects and leaves.
    let _vmm = kata.vmm("vc/vm/busy/clh.sock");
    for _ in 0..200 {
        // Refused where the last one's end was not seen yet.
        let _refused = Raw::connect(&kata.socket("vc/vm/busy/clh.sock"))
            .0
            .write_all(header(1).as_bytes());
    }
    blocked("vc/vm/other/clh.sock");
    let _other = kata.vmm("vc/vm/other/clh.sock");
    collector.wait_for("VM other: ");
    let said = collector.stop();
    let lines = |text: &str| said.iter().filter(|l| l.contains(text)).count();
    // Ten at once and one a minute, of each.
    assert!((10..13).contains(&lines("VM loud: ")), "{said:#?}");
    let busy = said
        .iter()
        .filter(|l| l.contains(&boot_id(1)) || l.contains("vm/busy/"))
        .count();
    assert!((10..13).contains(&busy), "{said:#?}");
}
