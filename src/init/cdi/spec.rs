//! Spec of the GPUs: states of the GPUs and files of the driver in, exactly the text that the
//! agent's CDI crate reads out. No I/O.

use super::schema::{Device as SpecDevice, DeviceNode, Edits, Hook, Mount, Spec};
use crate::config::{Hooks, Naming};
use crate::driver_files::{DriverFiles, Kind, Link};
use crate::gpu::device_nodes::Node;
use crate::gpu::driver_caps::MigInstance;
use kata_gpu_wire::failure::{Reason, VERDICT};
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::BTreeMap;

/// The kind under which the agent looks for GPUs.
pub const KIND: &str = "nvidia.com/gpu";
/// Directory that is never made: paths in it are placeholders for GPUs that are not ready.
pub const PENDING: &str = "/run/kata-gpu-init/pending";
/// End of such a path, in words for people: the agent prints the whole path.
const NOT_READY: &str = "-is-not-ready--see-kata-gpu-boot-show";

/// State of one GPU in the spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// Known, and not resolvable yet.
    Pending,
    /// Resolvable.
    Ready(Ready),
    /// A request for it fails at once: not listed while another GPU is pending, because the agent
    /// would wait for that one first; then listed with the reason, which the agent prints. None: it
    /// is not known yet.
    Failed(Option<Reason>),
    /// Not listed: it has left.
    Absent,
}

/// Parts of a GPU for a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// The GPU's own node.
    pub nodes: Vec<Node>,
    /// `GPU-..`, once the driver knows it.
    pub uuid: Option<String>,
    /// Extras of the GPU, known as soon as they were searched for.
    pub extras: Extras,
    /// `MIG-..` of the instances, known after an NVML query.
    pub instance_uuids: BTreeMap<MigInstance, String>,
}

/// Parts of a GPU besides its own node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extras {
    /// `/dev/dri/..`.
    pub displays: Vec<Node>,
    /// Links by which programs find the displays.
    pub links: Vec<DisplayLink>,
    /// Instances of a GPU in MIG mode, in their order.
    pub instances: Vec<Instance>,
}

/// A link to a display's node, in containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DisplayLink {
    pub link: String,
    pub target: String,
}

/// A MIG instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    pub id: MigInstance,
    /// Nodes of the instance's capabilities; the GPU's own node is in [`Ready::nodes`]. None: CUDA
    /// would find no device, so the instance is not listed, and keeps its number.
    pub nodes: Option<[Node; 2]>,
}

/// A GPU of the scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    pub index: usize,
    pub address: PciAddress,
    pub entry: Entry,
}

/// Options of a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub namings: Vec<Naming>,
    pub hooks: Hooks,
    /// Path of this program for the program that starts containers.
    pub hook_path: String,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            namings: vec![Naming::Index],
            hooks: Hooks::One,
            hook_path: "/init".into(),
        }
    }
}

/// A guest's node as a device node in containers.
pub fn node(node: &Node) -> DeviceNode {
    DeviceNode {
        path: node.path.display().to_string(),
        host_path: None,
        major: Some(node.major),
        minor: Some(node.minor),
        file_mode: Some(node.mode),
        permissions: Some("rwm"),
        gid: (node.gid != 0).then_some(node.gid),
    }
}

/// A node that makes the agent try again: without a major the agent looks at the path, which does
/// not exist, and prints it: for somebody with kubectl it is all that is said of the GPU.
fn pending(address: PciAddress) -> DeviceNode {
    DeviceNode {
        path: format!("{PENDING}/{address}{NOT_READY}"),
        ..DeviceNode::default()
    }
}

/// A mount that fails the container with the words of its destination: the agent refuses one with
/// `..` in it and prints it, also to the runtime, so that somebody with kubectl sees the verdict.
/// Agents that do not look at the destination find nothing at the source.
fn verdict(address: PciAddress, reason: Option<Reason>) -> Mount {
    let (name, cure) = reason.map_or(("unknown", ""), |reason| {
        (reason.name(), reason.cure_of_gpu())
    });
    Mount {
        host_path: format!("{PENDING}/{address}"),
        container_path: format!(
            "{VERDICT}{address} has failed ({name}): {cure}; see kata-gpu-boot show"
        ),
        options: FILE,
    }
}

impl Device {
    fn is_alive(&self) -> bool {
        matches!(self.entry, Entry::Pending | Entry::Ready(_))
    }

    fn ready(&self) -> Option<&Ready> {
        if let Entry::Ready(ready) = &self.entry {
            Some(ready)
        } else {
            None
        }
    }
}

/// All parts of these GPUs: with MIG all instances. A node that two instances share is listed once.
fn whole(name: String, gpus: &[&Device], options: &Options) -> SpecDevice {
    let (mut nodes, mut mounts) = (Vec::new(), Vec::new());
    for gpu in gpus {
        let ready = gpu.ready();
        if let Entry::Failed(reason) = gpu.entry {
            mounts.push(verdict(gpu.address, reason));
        }
        nodes.extend((gpu.entry == Entry::Pending).then(|| pending(gpu.address)));
        let instances = ready
            .iter()
            .flat_map(|r| &r.extras.instances)
            .flat_map(|i| i.nodes.iter().flatten());
        for one in ready
            .iter()
            .flat_map(|r| r.nodes.iter().chain(&r.extras.displays))
            .chain(instances)
            .map(node)
        {
            if !nodes.contains(&one) {
                nodes.push(one);
            }
        }
    }
    let links: Vec<&DisplayLink> = gpus
        .iter()
        .filter_map(|gpu| gpu.ready())
        .flat_map(|r| &r.extras.links)
        .collect();
    let mut device = device(name, nodes, display_hook(&links, options));
    device.container_edits.mounts = mounts;
    device
}

/// A device with these nodes and hooks.
pub fn device(name: String, device_nodes: Vec<DeviceNode>, hooks: Vec<Hook>) -> SpecDevice {
    SpecDevice {
        name,
        container_edits: Edits {
            device_nodes,
            hooks,
            ..Edits::default()
        },
    }
}

/// Hook that makes the links of displays in containers. No mount can stand for a link to a device,
/// so a hook is needed.
fn display_hook(links: &[&DisplayLink], options: &Options) -> Vec<Hook> {
    if links.is_empty() || options.hooks == Hooks::None {
        return vec![];
    }
    let arguments = links
        .iter()
        .flat_map(|l| ["--link".to_string(), format!("{}::{}", l.target, l.link)]);
    vec![hook("create-symlinks", arguments.collect(), options)]
}

/// Devices under which this GPU can be requested.
fn named(gpu: &Device, naming: Naming, options: &Options) -> Vec<SpecDevice> {
    let (index, ready) = (gpu.index, gpu.ready());
    let name = match naming {
        Naming::Index => Some(index.to_string()),
        Naming::TypeIndex => Some(format!("gpu{index}")),
        Naming::Uuid => ready.and_then(|r| r.uuid.clone()),
    };
    let instances = ready
        .into_iter()
        .flat_map(|r| r.extras.instances.iter().map(move |i| (r, i)))
        .enumerate();
    let instances = instances.filter_map(|(i, (ready, instance))| {
        let nodes = instance.nodes.as_ref()?;
        let name = match naming {
            Naming::Index => format!("{index}:{i}"),
            Naming::TypeIndex => format!("mig{index}:{i}"),
            Naming::Uuid => ready.instance_uuids.get(&instance.id)?.clone(),
        };
        // An instance computes: no display.
        Some(device(
            name,
            ready.nodes.iter().chain(nodes).map(node).collect(),
            vec![],
        ))
    });
    name.map(|name| whole(name, &[gpu], options))
        .into_iter()
        .chain(instances)
        .collect()
}

/// The spec for these GPUs, in ascending order of address. `common` are the nodes that every
/// container with a GPU gets, `files` the driver's user space for it.
///
/// Besides the requested namings there is `all`, which holds every GPU that has not failed: it
/// becomes resolvable with the last of them, and fails as they do when every GPU has failed. When
/// all have left, the spec lists one device `none`, because a spec without devices is invalid and
/// an absent kind makes the agent wait for it.
pub fn generate(
    devices: &[Device],
    common: &[Node],
    files: Option<&DriverFiles>,
    options: &Options,
) -> Spec {
    let is_pending = devices.iter().any(|d| d.entry == Entry::Pending);
    let listed = || {
        let devices = devices.iter();
        devices.filter(|d| match d.entry {
            Entry::Pending | Entry::Ready(_) => true,
            Entry::Failed(_) => !is_pending,
            Entry::Absent => false,
        })
    };
    let mut list: Vec<SpecDevice> = options
        .namings
        .iter()
        .flat_map(|naming| listed().flat_map(|gpu| named(gpu, *naming, options)))
        .collect();
    // `void`: this container has its GPUs already; hooks for this variable must add none.
    let void = || vec!["NVIDIA_VISIBLE_DEVICES=void".to_string()];
    let has_alive = listed().any(Device::is_alive);
    let all: Vec<&Device> = listed().filter(|d| d.is_alive() == has_alive).collect();
    if all.is_empty() {
        list.push(SpecDevice {
            name: "none".into(),
            container_edits: Edits {
                env: void(),
                ..Edits::default()
            },
        });
    } else {
        list.push(whole("all".into(), &all, options));
    }
    let mut edits = files
        .map(|files| edits_of(files, options))
        .unwrap_or_default();
    edits.device_nodes = common.iter().map(node).collect();
    if edits != Edits::default() {
        edits.env.splice(0..0, void());
    }
    Spec::new(KIND, list, edits)
}

/// Edits that give a container the driver's user space.
pub fn edits_of(files: &DriverFiles, options: &Options) -> Edits {
    let env = files
        .libcuda_directory
        .iter()
        .map(|d| format!("NVIDIA_CTK_LIBCUDA_DIR={}", d.display()))
        .collect();
    Edits {
        env,
        mounts: mounts(files),
        hooks: hooks(files, options),
        ..Edits::default()
    }
}

/// Mount options of a file.
pub const FILE: &[&str] = &["ro", "nosuid", "nodev", "rbind", "rprivate"];
const SOCKET: &[&str] = &["nosuid", "nodev", "rbind", "rprivate", "noexec"];

/// Files, parents first, then the links, each as a mount of its target: nothing has to be made in
/// the container's root for them.
fn mounts(files: &DriverFiles) -> Vec<Mount> {
    let file = |m: &crate::driver_files::Mount| Mount {
        host_path: m.host_path.display().to_string(),
        container_path: m.container_path.display().to_string(),
        options: if m.kind == Kind::Socket { SOCKET } else { FILE },
    };
    let link = |l: &Link| Mount {
        host_path: l.file.display().to_string(),
        container_path: l.link.display().to_string(),
        options: FILE,
    };
    let links = files.links.iter().map(link);
    files.mounts.iter().map(file).chain(links).collect()
}

/// Environment of a hook. Some runtimes replace an empty one by their own.
const HOOK_ENV: &str = "NVIDIA_CTK_DEBUG=false";

fn hook(command: &str, arguments: Vec<String>, options: &Options) -> Hook {
    Hook {
        hook_name: "createContainer",
        path: options.hook_path.clone(),
        args: [super::hooks::NAME.to_string(), command.to_string()]
            .into_iter()
            .chain(arguments)
            .collect(),
        env: vec![HOOK_ENV.into()],
    }
}

fn hooks(files: &DriverFiles, options: &Options) -> Vec<Hook> {
    if options.hooks == Hooks::None {
        return vec![];
    }
    let folders = files
        .library_directories
        .iter()
        .flat_map(|d| ["--folder".to_string(), d.display().to_string()]);
    let version = format!("--host-driver-version={}", files.version);
    vec![hook("prepare", folders.chain([version]).collect(), options)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(index: usize, entry: Entry) -> Device {
        Device {
            index,
            address: format!("0001:00:{index:02x}.0").parse().unwrap(),
            entry,
        }
    }

    fn gpu_node(minor: u32) -> Node {
        Node {
            path: format!("/dev/nvidia{minor}").into(),
            major: 195,
            minor,
            mode: 0o666,
            gid: 0,
        }
    }

    fn ready(minor: u32) -> Entry {
        Entry::Ready(Ready {
            nodes: vec![gpu_node(minor)],
            ..Ready::default()
        })
    }

    fn text(devices: &[Device], common: &[Node]) -> String {
        String::from_utf8(generate(devices, common, None, &Options::default()).to_json()).unwrap()
    }

    fn nodes(spec: &Spec) -> Vec<(&str, Vec<&str>)> {
        spec.devices
            .iter()
            .map(|d| {
                (
                    d.name.as_str(),
                    d.container_edits
                        .device_nodes
                        .iter()
                        .map(|n| n.path.as_str())
                        .collect(),
                )
            })
            .collect()
    }

    #[test]
    fn a_pending_gpu_is_listed_with_a_path_that_does_not_exist() {
        assert_eq!(
            text(&[device(0, Entry::Pending)], &[]),
            concat!(
                r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":["#,
                r#"{"name":"0","containerEdits":{"deviceNodes":["#,
                r#"{"path":"/run/kata-gpu-init/pending/0001:00:00.0-is-not-ready--see-kata-gpu-boot-show"}]}},"#,
                r#"{"name":"all","containerEdits":{"deviceNodes":["#,
                r#"{"path":"/run/kata-gpu-init/pending/0001:00:00.0-is-not-ready--see-kata-gpu-boot-show"}]}}]}"#
            )
        );
    }

    #[test]
    fn names_follow_pci_order_and_paths_the_minors() {
        let spec = generate(
            &[device(0, ready(3)), device(1, ready(0))],
            &[gpu_node(255)],
            None,
            &Options::default(),
        );
        assert_eq!(
            nodes(&spec),
            [
                ("0", vec!["/dev/nvidia3"]),
                ("1", vec!["/dev/nvidia0"]),
                ("all", vec!["/dev/nvidia3", "/dev/nvidia0"])
            ]
        );
    }

    #[test]
    fn a_failed_gpu_leaves_while_another_is_pending_and_affects_none() {
        let spec = text(
            &[
                device(0, ready(0)),
                device(1, Entry::Failed(Some(Reason::FirmwareBoot))),
                device(2, Entry::Pending),
            ],
            &[],
        );
        assert!(
            !spec.contains("\"1\"") && !spec.contains("0001:00:01.0"),
            "{spec}"
        );
        assert!(
            spec.contains("\"2\"") && spec.contains("0001:00:02.0"),
            "{spec}"
        );
    }

    #[test]
    fn a_failed_gpu_gives_its_verdict_as_soon_as_no_gpu_is_pending() {
        let failed = device(1, Entry::Failed(Some(Reason::FirmwareBoot)));
        let verdicts = |devices: &[Device]| {
            let spec = generate(devices, &[], None, &Options::default());
            let devices = spec.devices.into_iter();
            let mounts = devices.flat_map(|d| {
                let mounts = d.container_edits.mounts.into_iter();
                mounts.map(move |mount| (d.name.clone(), mount.container_path))
            });
            mounts.collect::<Vec<_>>()
        };
        let words = "/../GPU 0001:00:01.0 has failed (firmware-boot): reset the GPU on the host; \
            if it stays, try another release of the driver; see kata-gpu-boot show"
            .to_string();
        assert_eq!(
            verdicts(&[device(0, ready(0)), failed.clone()]),
            [("1".to_string(), words.clone())],
            "all has those that are left"
        );
        assert_eq!(
            verdicts(&[device(0, Entry::Absent), failed]),
            [("1".to_string(), words.clone()), ("all".into(), words)]
        );
    }

    #[test]
    fn when_all_have_left_the_kind_stays_and_no_gpu_is_in_it() {
        let spec = text(&[device(0, Entry::Absent)], &[gpu_node(255)]);
        assert!(spec.contains(r#""devices":[{"name":"none","#), "{spec}");
    }

    #[test]
    fn a_gpu_in_mig_mode_is_listed_whole_and_by_its_instances() {
        let cap = |minor| Node {
            path: format!("/dev/nvidia-caps/nvidia-cap{minor}").into(),
            major: 235,
            minor,
            mode: 0o444,
            gid: 0,
        };
        let instance = |gi, ci| Instance {
            id: MigInstance { gpu: 0, gi, ci },
            nodes: Some([cap(gi), cap(ci)]),
        };
        // One without its nodes is not listed, and keeps its number.
        let without = Instance {
            nodes: None,
            ..instance(66, 69)
        };
        let extras = Extras {
            instances: vec![
                instance(66, 67),
                instance(66, 68),
                without,
                instance(75, 76),
            ],
            ..Extras::default()
        };
        let entry = Entry::Ready(Ready {
            nodes: vec![gpu_node(0)],
            extras,
            ..Ready::default()
        });
        let options = Options {
            namings: vec![Naming::Index, Naming::TypeIndex],
            ..Options::default()
        };
        let spec = generate(&[device(0, entry)], &[], None, &options);
        let (caps, all) = (
            [
                "/dev/nvidia-caps/nvidia-cap66",
                "/dev/nvidia-caps/nvidia-cap67",
            ],
            nodes(&spec),
        );
        assert_eq!(
            all.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            [
                "0", "0:0", "0:1", "0:3", "gpu0", "mig0:0", "mig0:1", "mig0:3", "all"
            ]
        );
        assert_eq!(all[1].1, [&["/dev/nvidia0"][..], &caps[..]].concat());
        // The GPU instance that two compute instances share is listed once.
        assert_eq!(all[0].1.len(), 1 + 5);
    }

    #[test]
    fn a_known_uuid_of_an_instance_names_the_same_nodes() {
        let cap = |minor| Node {
            path: format!("/dev/nvidia-caps/nvidia-cap{minor}").into(),
            major: 235,
            minor,
            mode: 0o444,
            gid: 0,
        };
        let id = |gi| MigInstance { gpu: 0, gi, ci: 0 };
        let extras = Extras {
            instances: [7, 9]
                .map(|gi| Instance {
                    id: id(gi),
                    nodes: Some([cap(gi), cap(gi + 1)]),
                })
                .to_vec(),
            ..Extras::default()
        };
        let options = Options {
            namings: vec![Naming::Index, Naming::Uuid],
            ..Options::default()
        };
        let spec = |uuids: &[(u32, &str)]| {
            let instance_uuids = uuids
                .iter()
                .map(|(gi, uuid)| (id(*gi), uuid.to_string()))
                .collect();
            let ready = Ready {
                nodes: vec![gpu_node(0)],
                extras: extras.clone(),
                instance_uuids,
                ..Ready::default()
            };
            generate(&[device(0, Entry::Ready(ready))], &[], None, &options)
        };
        // An instance that the driver's files do not list has no nodes.
        let spec_of_two = spec(&[(9, "MIG-9"), (3, "MIG-3")]);
        let all = nodes(&spec_of_two);
        assert_eq!(
            all.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
            ["0", "0:0", "0:1", "MIG-9", "all"]
        );
        assert_eq!(all[3].1, all[2].1);
        let caps = [9, 10].map(|cap| format!("/dev/nvidia-caps/nvidia-cap{cap}"));
        assert_eq!(all[3].1, ["/dev/nvidia0", &caps[0], &caps[1]]);
        assert_eq!(nodes(&spec(&[])).len(), 4);
    }

    #[test]
    fn displays_come_with_udevs_links_and_a_hook_for_them() {
        let display = |index: usize| {
            let at = |name: String, minor| Node {
                path: format!("/dev/dri/{name}").into(),
                major: 226,
                minor,
                mode: 0o660,
                gid: 44,
            };
            let link = DisplayLink {
                link: format!("/dev/dri/by-path/pci-0001:00:{index:02x}.0-card"),
                target: format!("../card{index}"),
            };
            let (displays, links) = (vec![at(format!("card{index}"), index as u32)], vec![link]);
            let extras = Extras {
                displays,
                links,
                ..Extras::default()
            };
            device(
                index,
                Entry::Ready(Ready {
                    nodes: vec![gpu_node(index as u32)],
                    extras,
                    ..Ready::default()
                }),
            )
        };
        for (hooks, count) in [(Hooks::One, 1), (Hooks::None, 0)] {
            let spec = generate(
                &[display(0), display(1)],
                &[],
                None,
                &Options {
                    hooks,
                    ..Options::default()
                },
            );
            assert_eq!(nodes(&spec)[1].1, ["/dev/nvidia1", "/dev/dri/card1"]);
            assert_eq!(
                spec.devices[1].container_edits.device_nodes[1].gid,
                Some(44)
            );
            assert!(
                spec.devices
                    .iter()
                    .all(|d| d.container_edits.hooks.len() == count),
                "{hooks:?}"
            );
            let links: Vec<&str> = spec.devices[2]
                .container_edits
                .hooks
                .iter()
                .flat_map(|h| &h.args[2..])
                .map(String::as_str)
                .collect();
            let wanted = [
                "--link",
                "../card0::/dev/dri/by-path/pci-0001:00:00.0-card",
                "--link",
                "../card1::/dev/dri/by-path/pci-0001:00:01.0-card",
            ];
            assert_eq!(links, if count == 1 { &wanted[..] } else { &[] });
        }
    }

    #[test]
    fn a_uuid_is_a_name_once_it_is_known() {
        let options = Options {
            namings: vec![Naming::Index, Naming::Uuid],
            ..Options::default()
        };
        let uuid = |uuid: Option<&str>| {
            Entry::Ready(Ready {
                nodes: vec![gpu_node(0)],
                uuid: uuid.map(str::to_string),
                ..Ready::default()
            })
        };
        let spec = generate(
            &[
                device(0, uuid(Some("GPU-1"))),
                device(1, uuid(None)),
                device(2, Entry::Pending),
            ],
            &[],
            None,
            &options,
        );
        assert_eq!(
            nodes(&spec)
                .iter()
                .map(|(name, _)| *name)
                .collect::<Vec<_>>(),
            ["0", "1", "2", "GPU-1", "all"]
        );
    }

    #[test]
    fn links_are_mounts_of_their_file_or_arguments_of_a_hook() {
        let files = DriverFiles {
            version: "550.163.01".into(),
            libcuda_directory: Some("/usr/lib".into()),
            library_directories: vec!["/usr/lib".into()],
            links: vec![Link {
                link: "/usr/lib/libcuda.so.1".into(),
                target: "libcuda.so.550.163.01".into(),
                file: "/usr/lib/libcuda.so.550.163.01".into(),
            }],
            ..DriverFiles::default()
        };
        let with = |hooks| {
            generate(
                &[device(0, ready(0))],
                &[],
                Some(&files),
                &Options {
                    hooks,
                    ..Options::default()
                },
            )
            .container_edits
        };
        let (one, none) = (with(Hooks::One), with(Hooks::None));
        assert_eq!(
            one.mounts
                .iter()
                .map(|m| m.container_path.as_str())
                .collect::<Vec<_>>(),
            ["/usr/lib/libcuda.so.1"]
        );
        assert_eq!(
            one.hooks
                .iter()
                .map(|h| h.args.join(" "))
                .collect::<Vec<_>>(),
            ["nvidia-cdi-hook prepare --folder /usr/lib --host-driver-version=550.163.01"]
        );
        assert_eq!((none.mounts.len(), none.hooks.len()), (1, 0));
        assert!(
            one.env
                .contains(&"NVIDIA_CTK_LIBCUDA_DIR=/usr/lib".to_string())
        );
    }
}
