//! NVIDIA's services in an image: those that each topology starts, and their missing parts.
//!
//! The guest's own [`SERVICES`] and [`plan`] define the started services and their needs; nothing
//! is repeated here.

use super::image_rules::*;
use super::modules;
use super::programs::Programs;
use super::question::Question;
use super::scripts::script;
use crate::images::entry_text::escaped;
use crate::images::newc::Kind;
use crate::images::unpacked_root::{Id, Tree};
use kata_gpu_init::config::Services as Asked;
use kata_gpu_init::gpu::topology::Topology;
use kata_gpu_init::services::configuration::{MAX_FILE, package, with_values};
use kata_gpu_init::services::launch::account_in;
use kata_gpu_init::services::service_plan::{Decision, Facts, plan};
use kata_gpu_init::services::service_table::{Name, SERVICES, Service};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Longest /etc/passwd that is read.
const MAX_PASSWD: u64 = 1 << 20;
const PASSWD: &str = "/etc/passwd";

/// A service of the table, as an image has it.
#[derive(Debug)]
pub struct Found {
    pub name: Name,
    /// Path of the service's program; None: the image has none.
    pub program: Option<String>,
    /// Reasons why the service would not start.
    pub lacks: Vec<String>,
    /// Deviations that do not keep the service from starting.
    pub remarks: Vec<String>,
}

impl Found {
    fn is_whole(&self) -> bool {
        self.program.is_some() && self.lacks.is_empty()
    }
}

/// Services that a kind of guest starts by itself.
#[derive(Debug)]
pub struct Case {
    pub topology: Topology,
    pub confidential: bool,
    /// Functions of the guest manage NVLink switches.
    pub managed: bool,
    pub services: Vec<Wanted>,
}

/// A service that a kind of guest starts.
#[derive(Debug, PartialEq, Eq)]
pub struct Wanted {
    pub name: Name,
    /// Whether the guest reports an error if the service is missing.
    pub needed: bool,
}

impl Case {
    fn of(topology: Topology, confidential: bool, managed: bool) -> Self {
        let facts = Facts {
            topology,
            confidential,
            managed,
            asked: &Asked::default(),
            programs: &BTreeMap::new(),
        };
        // Without programs, the plan lists every wanted service as missing.
        let wanted = plan(&facts)
            .into_iter()
            .filter_map(|entry| match entry.decision {
                Decision::Missing { needed } => Some(Wanted {
                    name: entry.name,
                    needed,
                }),
                Decision::Starts { .. } | Decision::Off => None,
            });
        Self {
            topology,
            confidential,
            managed,
            services: wanted.collect(),
        }
    }

    /// Every topology, and again if confidentiality or management functions change its services.
    fn all() -> Vec<Self> {
        let of = |topology: Topology| {
            let plain = Self::of(topology, false, false);
            let mut others = vec![
                Self::of(topology, true, false),
                Self::of(topology, false, true),
            ];
            others.retain(|other| other.services != plain.services);
            std::iter::once(plain).chain(others)
        };
        Topology::ALL.into_iter().flat_map(of).collect()
    }

    pub fn title(&self) -> String {
        let more = [
            (self.confidential, ", confidential"),
            (self.managed, ", with a management port"),
        ];
        let more: String = more
            .iter()
            .filter(|(is, _)| *is)
            .map(|(_, text)| *text)
            .collect();
        format!("{}{more}", self.topology)
    }
}

/// All services and all kinds of guests.
#[derive(Debug)]
pub struct Services {
    pub found: Vec<Found>,
    pub cases: Vec<Case>,
}

impl Services {
    pub fn look(tree: &Tree, programs: &mut Programs, release: Option<&str>) -> Self {
        let passwd = tree
            .find(PASSWD)
            .and_then(|id| tree.content(id))
            .and_then(|c| c.bytes(MAX_PASSWD).ok())
            .unwrap_or_default();
        let passwd = String::from_utf8_lossy(&passwd).into_owned();
        let found = SERVICES
            .iter()
            .map(|service| look(tree, programs, service, release, &passwd))
            .collect();
        Self {
            found,
            cases: Case::all(),
        }
    }

    fn of(&self, name: Name) -> Option<&Found> {
        self.found.iter().find(|found| found.name == name)
    }

    /// Services of a kind of guest: first those whole in the image, then the others.
    pub fn split(&self, case: &Case) -> (Vec<Name>, Vec<Name>) {
        case.services
            .iter()
            .map(|wanted| wanted.name)
            .partition(|name| self.of(*name).is_some_and(Found::is_whole))
    }

    /// Services that some topology starts and the image lacks, each with what it lacks.
    pub fn lacking(&self) -> Vec<(Name, String)> {
        let is_wanted = |name: Name| {
            self.cases
                .iter()
                .any(|case| case.services.iter().any(|wanted| wanted.name == name))
        };
        let lacking = self.found.iter().filter(|found| {
            !found.is_whole() && (found.program.is_some() || is_wanted(found.name))
        });
        lacking
            .map(|found| (found.name, found.lacks.join("; ")))
            .collect()
    }

    /// Findings about services whose programs are in the image, and about the requested topologies.
    pub fn findings(&self, question: &Question) -> Vec<Finding> {
        let mut findings = Vec::new();
        for found in &self.found {
            let Some(program) = &found.program else {
                continue;
            };
            let of = |rule: &'static Rule, what: &Vec<String>| {
                Finding::new(rule, program).value(what.join("; "))
            };
            if !found.lacks.is_empty() {
                findings.push(of(&SERVICE_BROKEN, &found.lacks));
            }
            if !found.remarks.is_empty() {
                findings.push(of(&SERVICE_REMARK, &found.remarks));
            }
        }
        for topology in &question.topologies {
            let plain = Case::of(*topology, question.confidential, false);
            // Some guests of the topology have management functions, others have none.
            let case = Case::of(*topology, question.confidential, true);
            for wanted in &case.services {
                let Some(found) = self.of(wanted.name).filter(|found| !found.is_whole()) else {
                    continue;
                };
                let needed = plain
                    .services
                    .iter()
                    .any(|other| other.name == wanted.name && other.needed);
                let rule = if needed {
                    &SERVICE_MISSING
                } else {
                    &SERVICE_WANTED
                };
                findings.push(Finding::new(rule, case.title()).value(format!(
                    "{}: {}",
                    wanted.name,
                    found.lacks.join("; ")
                )));
            }
        }
        findings
    }

    pub fn json(&self) -> Value {
        let service = |found: &Found| json!({"service": found.name.name(), "program": found.program, "lacks": found.lacks, "remarks": found.remarks});
        let case = |case: &Case| {
            let (has, lacks) = self.split(case);
            let names = |names: Vec<Name>| names.into_iter().map(Name::name).collect::<Vec<_>>();
            json!({
                "topology": case.topology.to_string(), "confidential": case.confidential, "managed": case.managed,
                "starts": names(has), "lacks": names(lacks),
            })
        };
        json!({"programs": self.found.iter().map(service).collect::<Vec<_>>(), "topologies": self.cases.iter().map(case).collect::<Vec<_>>()})
    }
}

fn look(
    tree: &Tree,
    programs: &mut Programs,
    service: &Service,
    release: Option<&str>,
    passwd: &str,
) -> Found {
    let mut found = Found {
        name: service.name,
        program: None,
        lacks: Vec::new(),
        remarks: Vec::new(),
    };
    let is_file = |path: &&str| tree.find(path).filter(|id| tree.kind(*id) == Kind::File);
    let Some((path, id)) = service
        .programs
        .iter()
        .find_map(|path| Some((path, is_file(path)?)))
    else {
        let paths: Vec<String> = service
            .programs
            .iter()
            .map(|path| format!("/{path}"))
            .collect();
        found.lacks.push(format!("no {}", paths.join(", ")));
        return found;
    };
    found.program = Some(format!("/{path}"));
    found.lacks.extend(faults(tree, programs, path, id));
    for library in service.opens {
        if !programs.opens(id, library) {
            found.lacks.push(format!(
                "library {library}, which it opens when it runs, is not found"
            ));
        }
    }
    for path in service.files.iter().filter(|path| is_file(path).is_none()) {
        found
            .lacks
            .push(format!("no /{path}, without which it fails"));
    }
    if let Some(path) = package(service.name) {
        found.lacks.extend(configuration(tree, path).err());
    }
    for account in service.accounts() {
        if account_in(passwd, account).is_none() {
            found
                .remarks
                .push(format!("runs as root: no account {account} in {PASSWD}"));
        }
    }
    let missing = modules::missing(tree, release, service.modules);
    let names = missing.modules.join(", ");
    match (missing.modules.is_empty(), missing.is_certain) {
        (true, _) => {}
        (false, true) => found.lacks.push(format!(
            "kernel modules {names} are neither in the image nor built in"
        )),
        (false, false) => found.remarks.push(format!(
            "kernel modules {names} are not in the image: the kernel must have them built in"
        )),
    }
    found
}

/// Reasons why a service's program cannot start.
fn faults(tree: &Tree, programs: &mut Programs, path: &str, id: Id) -> Vec<String> {
    let mode = tree.meta(id).mode;
    if mode & 0o111 == 0 {
        return vec![format!("not executable, mode {:04o}", mode & 0o7777)];
    }
    let faults = if programs.executable(id).is_some() {
        programs.faults(id)
    } else {
        script(tree, programs, path, id)
    };
    faults
        .into_iter()
        .map(|fault| format!("{}: {}", fault.rule.name, fault.value.unwrap_or_default()))
        .collect()
}

/// Errors: a package's configuration is missing, or the guest cannot derive its own from it.
fn configuration(tree: &Tree, path: &str) -> Result<(), String> {
    let content = tree
        .find(path)
        .and_then(|id| tree.content(id))
        .ok_or_else(|| format!("no configuration /{path}"))?;
    let text = content
        .bytes(MAX_FILE)
        .map_err(|e| format!("configuration /{path}: {e}"))?;
    let text = String::from_utf8(text).map_err(|_| format!("configuration /{path}: not text"))?;
    with_values(&text, &[]).map(drop).map_err(|why| {
        format!(
            "configuration {}: {why}",
            escaped(format!("/{path}").as_bytes())
        )
    })
}
