//! The table of services: one row each. Prints itself for the README.

use crate::gpu::topology::Topology;
use kata_gpu_wire::named;
use std::fmt::Write;
use std::time::Duration;

named! {
    /// Identity of a service: its name in parameters, events and the table. Sorts in start order.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum Name {
        Nvlsm = "nvlsm",
        FabricManager = "fabricmanager",
        Persistenced = "persistenced",
        HostEngine = "hostengine",
        DcgmExporter = "dcgm-exporter",
        ImexDaemon = "imex-daemon",
    }
}

/// Certain sign that a service works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// The foreground process daemonises; its exit status 0 is the sign, any other one a failure.
    ParentExits,
    /// The sign of `ParentExits`, and this TCP port is open: the parent exits with 0 after a
    /// failure, too.
    ParentExitsWithPort(u16),
    /// This socket is there. A program that makes none within [`Service::late`] is reported, and
    /// counts as ready.
    Socket(&'static str),
    /// The program runs: it has no sign of its own.
    Started,
}

/// State of the GPUs that a service waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gpus {
    Unneeded,
    /// All GPUs are usable or failed: an open of one that initialises would stall the others.
    Settled,
    /// State of `Settled`, or the end of [`SETTLED_LIMIT`]: the fabric of all GPUs must not wait
    /// for a GPU that hangs.
    SettledInTime,
}

/// Longest wait of a service for GPUs that other GPUs need.
pub const SETTLED_LIMIT: Duration = Duration::from_secs(60);

/// Condition for a service without a setting on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    Always,
    IfConfidential,
    /// If a management function leads to switches.
    IfManaged,
    WhenAsked,
}

/// Restart of a service that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restart {
    Always,
    /// Not in a confidential guest, where the end of a client can end its GPUs until their reset.
    UnlessConfidential,
}

/// An argument of a program's command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Argument {
    Word(&'static str),
    /// `OPTION ACCOUNT`, where the image has that account: the program drops to it by itself.
    OwnAccount(&'static str, &'static str),
    /// `--uvm-persistence-mode`, where it costs no wait.
    UvmPersistence,
    /// `OPTION FILE`: the configuration made from the package's one.
    Configuration(&'static str),
    /// `OPTION FILE`, where the image has that file below the driver root.
    File(&'static str, &'static str),
    /// `OPTION GUID` of the management port, where one is known.
    PortGuid(&'static str),
    /// `-r localhost:5555`, where the host engine is a service of its own.
    HostEngine,
}

/// Capability of Linux, by its number in linux/capability.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    Chown = 0,
    DacOverride = 1,
    Fowner = 3,
    Kill = 5,
    Setgid = 6,
    Setuid = 7,
    IpcLock = 14,
    SysAdmin = 21,
    Mknod = 27,
}

/// A row of the table.
pub struct Service {
    pub name: Name,
    /// Paths below the driver root; the first one that exists counts.
    pub programs: &'static [&'static str],
    pub arguments: &'static [Argument],
    /// Libraries that the program opens by these names when it runs: its ELF headers name none of
    /// them.
    pub opens: &'static [&'static str],
    /// Files below the guest's root without which the program fails.
    pub files: &'static [&'static str],
    /// Kernel modules that must be loaded first.
    pub modules: &'static [&'static str],
    /// Services that must be ready first, where they start.
    pub after: &'static [Name],
    pub gpus: Gpus,
    pub ready: Ready,
    /// Time after which a service that is not ready, or still waits, is reported.
    pub late: Duration,
    pub restart: Restart,
    /// Account of the program, where the image has it.
    pub account: Option<&'static str>,
    /// Capabilities that stay, for programs that start as root.
    pub capabilities: &'static [Capability],
    /// Score of the OOM killer, between the init's (-998) and containers' (0 and more).
    pub oom_score: i32,
    /// In the order of [`Topology::ALL`].
    pub starts: [Start; 7],
}

use Argument::{Configuration, File, HostEngine, OwnAccount, PortGuid, UvmPersistence, Word};
use Capability::{Chown, DacOverride, Fowner, IpcLock, Kill, Mknod, Setgid, Setuid, SysAdmin};
use Start::{Always, IfConfidential, IfManaged, WhenAsked};

const LATE: Duration = Duration::from_secs(20);
const DCGM_ACCOUNT: &str = "nvidia-dcgm";
/// Port at which nv-hostengine listens by default, on the loopback interface.
pub const HOST_ENGINE_PORT: u16 = 5555;

/// All services, in start order.
pub const SERVICES: [Service; 6] = [
    Service {
        name: Name::Nvlsm,
        programs: &[
            "opt/nvidia/nvlsm/sbin/nvlsm",
            "usr/bin/nvlsm",
            "usr/sbin/nvlsm",
            "sbin/nvlsm",
        ],
        arguments: &[
            File("-F", "usr/share/nvidia/nvlsm/nvlsm.conf"),
            PortGuid("-g"),
            Word("-f"),
            Word("stdout"),
        ],
        opens: &[],
        files: &[],
        modules: &["mlx5_ib", "ib_umad"],
        after: &[],
        gpus: Gpus::Unneeded,
        // Fabric manager connects to this socket.
        ready: Ready::Socket("/run/nvidia-fabricmanager/fm_sm_ipc.socket"),
        late: LATE,
        restart: Restart::Always,
        account: None,
        capabilities: &[DacOverride, IpcLock, SysAdmin],
        oom_score: -900,
        starts: [
            WhenAsked, WhenAsked, WhenAsked, WhenAsked, Always, IfManaged, WhenAsked,
        ],
    },
    Service {
        name: Name::FabricManager,
        programs: &["usr/bin/nv-fabricmanager", "bin/nv-fabricmanager"],
        arguments: &[Configuration("-c"), PortGuid("-g")],
        opens: &[],
        files: &[],
        modules: &[],
        after: &[Name::Nvlsm],
        // Fabric manager opens GPUs.
        gpus: Gpus::SettledInTime,
        ready: Ready::Started,
        late: LATE,
        restart: Restart::Always,
        account: None,
        capabilities: &[Chown, DacOverride, Fowner, IpcLock, SysAdmin, Mknod],
        oom_score: -900,
        starts: [
            WhenAsked, WhenAsked, Always, Always, Always, Always, WhenAsked,
        ],
    },
    Service {
        name: Name::Persistenced,
        programs: &["usr/bin/nvidia-persistenced", "bin/nvidia-persistenced"],
        arguments: &[
            Word("--verbose"),
            OwnAccount("--user", "nvidia-persistenced"),
            UvmPersistence,
        ],
        opens: &["libnvidia-cfg.so.1"],
        // libtirpc makes no socket without this list of transports.
        files: &["etc/netconfig"],
        modules: &[],
        after: &[Name::FabricManager],
        gpus: Gpus::Settled,
        ready: Ready::ParentExits,
        late: LATE,
        restart: Restart::UnlessConfidential,
        account: None,
        capabilities: &[Chown, DacOverride, Fowner, Kill, Setgid, Setuid, SysAdmin],
        oom_score: -900,
        starts: [
            WhenAsked,
            IfConfidential,
            IfConfidential,
            IfConfidential,
            IfConfidential,
            WhenAsked,
            IfConfidential,
        ],
    },
    Service {
        name: Name::HostEngine,
        programs: &["usr/bin/nv-hostengine", "bin/nv-hostengine"],
        arguments: &[
            OwnAccount("--service-account", DCGM_ACCOUNT),
            Word("--home-dir"),
            Word("/tmp"),
        ],
        opens: &[],
        files: &[],
        modules: &[],
        after: &[Name::Persistenced],
        gpus: Gpus::Settled,
        ready: Ready::ParentExitsWithPort(HOST_ENGINE_PORT),
        late: LATE,
        restart: Restart::Always,
        account: None,
        capabilities: &[Chown, DacOverride, Fowner, Kill, Setgid, Setuid, SysAdmin],
        oom_score: -100,
        starts: [WhenAsked; 7],
    },
    Service {
        name: Name::DcgmExporter,
        programs: &[
            "usr/bin/dcgm-exporter",
            "usr/local/bin/dcgm-exporter",
            "bin/dcgm-exporter",
        ],
        arguments: &[
            Word("-k"),
            File("-f", "etc/dcgm-exporter/default-counters.csv"),
            HostEngine,
        ],
        opens: &[],
        files: &[],
        modules: &[],
        after: &[Name::HostEngine],
        gpus: Gpus::Settled,
        ready: Ready::Started,
        late: LATE,
        restart: Restart::Always,
        account: Some(DCGM_ACCOUNT),
        capabilities: &[DacOverride, SysAdmin],
        oom_score: 100,
        starts: [WhenAsked; 7],
    },
    Service {
        name: Name::ImexDaemon,
        programs: &["usr/bin/nvidia-imex", "bin/nvidia-imex"],
        arguments: &[Configuration("-c")],
        opens: &[],
        files: &[],
        modules: &[],
        after: &[],
        gpus: Gpus::Settled,
        ready: Ready::Started,
        late: LATE,
        restart: Restart::Always,
        account: None,
        capabilities: &[DacOverride, SysAdmin, Mknod],
        oom_score: -900,
        starts: [WhenAsked; 7],
    },
];

impl Service {
    /// Accounts that the service drops to, where the image has them.
    pub fn accounts(&self) -> Vec<&'static str> {
        let own = self.arguments.iter().filter_map(|argument| {
            if let Argument::OwnAccount(_, account) = argument {
                Some(*account)
            } else {
                None
            }
        });
        own.chain(self.account).collect()
    }

    pub fn start_in(&self, topology: Topology) -> Start {
        Topology::ALL
            .iter()
            .position(|column| *column == topology)
            .map_or(WhenAsked, |column| self.starts[column])
    }
}

/// The table of services in Markdown, as it stands in the README.
pub fn services_markdown() -> String {
    let mut table = String::from("| service | program |");
    let mut line = String::from("\n|---|---|");
    for topology in Topology::ALL {
        // Writing to a String cannot fail, here and below.
        let _unused = write!(table, " {topology} |");
        line.push_str("---|");
    }
    let _unused = writeln!(
        table,
        " starts after | ready when | restarted |{line}---|---|---|"
    );
    for service in &SERVICES {
        let program = service.programs.first().copied().unwrap_or_default();
        let _unused = write!(table, "| `{}` | `/{program}` |", service.name);
        for start in service.starts {
            let cell = match start {
                Always => "starts",
                IfConfidential => "if confidential",
                IfManaged => "with a management port",
                WhenAsked => "",
            };
            let _unused = write!(table, " {cell} |");
        }
        let gpus = match service.gpus {
            Gpus::Unneeded => "modules loaded",
            Gpus::Settled => "all GPUs settled",
            Gpus::SettledInTime => "all GPUs settled, or 60 s",
        };
        let after: String = service
            .after
            .iter()
            .map(|name| format!(", {name}"))
            .collect();
        let ready = match service.ready {
            Ready::ParentExits => "its parent exits with 0".to_string(),
            Ready::ParentExitsWithPort(port) => {
                format!("its parent exits with 0, and port {port} is open")
            }
            Ready::Socket(path) => format!("`{path}` is there"),
            Ready::Started => "it runs".to_string(),
        };
        let restart = match service.restart {
            Restart::Always => "yes",
            Restart::UnlessConfidential => "unless confidential",
        };
        let _unused = writeln!(table, " {gpus}{after} | {ready} | {restart} |");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stand_in_start_order_and_wait_for_earlier_rows_only() {
        assert!(SERVICES.is_sorted_by_key(|service| service.name));
        for service in &SERVICES {
            assert!(
                service.after.iter().all(|before| *before < service.name),
                "{}",
                service.name
            );
        }
    }

    /// The package lists of images contain, for each row, every path, account and module.
    #[test]
    fn the_contents_of_images_have_everything_that_the_table_names() {
        let text = include_str!("../../../initrd/contents/services");
        let compute = include_str!("../../../initrd/contents/compute");
        let words = |line: &str| {
            line.split('#')
                .next()
                .unwrap_or_default()
                .split_whitespace()
                .map(str::to_string)
                .collect::<Vec<_>>()
        };
        let lines: Vec<Vec<String>> = text
            .lines()
            .map(words)
            .filter(|words| !words.is_empty())
            .collect();
        let rows: Vec<Vec<String>> = lines
            .iter()
            .filter(|line| line[0] == "service")
            .map(|line| line[1..].to_vec())
            .collect();
        let paths = |service: &Service| {
            service
                .programs
                .iter()
                .map(|path| format!("/{path}"))
                .collect::<Vec<_>>()
        };
        let wanted: Vec<Vec<String>> = SERVICES
            .iter()
            .map(|service| [vec![service.name.to_string()], paths(service)].concat())
            .collect();
        assert_eq!(rows, wanted);
        for service in &SERVICES {
            let of: Vec<String> = lines
                .iter()
                .filter(|line| line[0] == "of" && line[1] == service.name.name())
                .map(|line| line[2..].join(" "))
                .collect();
            let has = |start: &str| of.iter().any(|line| line.starts_with(start));
            for account in service.accounts() {
                assert!(
                    has(&format!("text /etc/passwd {account}:")),
                    "{}: {account}",
                    service.name
                );
            }
            for module in service.modules {
                assert!(
                    has(&format!("kernel-module {module}")),
                    "{}: {module}",
                    service.name
                );
            }
            if let Some(path) = super::super::configuration::package(service.name) {
                assert!(has(&format!("config /{path}")), "{}: {path}", service.name);
            }
            for path in service.files {
                assert!(has(&format!("config /{path}")), "{}: {path}", service.name);
            }
            for argument in service.arguments {
                if let Argument::File(_, path) = argument {
                    let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
                    assert!(has(&format!("tree /{parent}")), "{}: {path}", service.name);
                }
            }
            for library in service.opens {
                let name = library.split(".so").next().unwrap_or_default();
                assert!(
                    compute
                        .lines()
                        .any(|line| line.starts_with(&format!("library {name} guest"))),
                    "{}: {library}",
                    service.name
                );
            }
        }
    }

    #[test]
    fn the_readme_has_the_table_of_services_that_the_code_prints() {
        let table = services_markdown();
        assert!(
            include_str!("README.md").contains(&table),
            "src/init/services/README.md's table of services is not:\n{table}"
        );
    }
}
