//! `image verify`: checks that an image can boot as a Kata guest with NVIDIA GPUs. Reads the
//! image, and runs nothing.
//!
//! Error: the image does not boot, or gives no container a GPU; all else is a hint. Not here: facts
//! that only a boot shows (the driver supports the GPU, a signature is accepted).

mod driver_parts;
pub mod driver_root;
pub mod image_rules;
mod machines;
pub mod modules;
mod paths;
mod programs;
pub mod question;
pub mod scripts;
pub mod services;
pub mod verify_text;

use super::components;
use super::components::{Sizes, sizes_json};
use super::disk_image::hash_tree::State;
use super::entry_text::escaped;
use super::image::{Form, Image};
use super::newc::Kind;
use super::unpacked_root::{Id, Tree};
use driver_root::DriverRoot;
use image_rules::*;
use kata_gpu_init::boot::AGENT;
use kata_gpu_report::severity::Severity;
use kata_gpu_wire::arch::Arch;
pub use modules::Driver;
use programs::Programs;
pub use question::{INIT, INIT_OF_DISK, Question};
use scripts::script;
use serde::Serialize;
use serde_json::{Value, json};
use services::Services;

/// A required program.
#[derive(Debug, Serialize)]
pub struct Needed {
    pub path: String,
    /// Path with all links resolved.
    pub file: Option<String>,
    pub bytes: u64,
    /// Kind of linking.
    pub linked: &'static str,
}

#[derive(Debug)]
pub struct Report {
    pub form: Form,
    pub bytes: u64,
    pub entries: usize,
    pub init: Needed,
    pub agent: Needed,
    pub releases: Vec<String>,
    pub modules: usize,
    pub driver: Option<Driver>,
    /// The version of the driver's libraries.
    pub user_space: Option<String>,
    /// No part of the driver is in the image: it comes on an extension disk.
    pub driver_elsewhere: bool,
    /// None: services have the same source as the driver's user space.
    pub services: Option<Services>,
    pub sizes: Sizes,
    /// Known of a disk image with a second partition, or with parameters beside it.
    pub hash_tree: Option<State>,
    /// Errors first.
    pub findings: Vec<Finding>,
}

/// Checks an image.
pub fn check(image: &Image, tree: &Tree, question: &Question) -> Report {
    let mut findings = Vec::new();
    let mut programs = Programs::new(tree);
    let (init, init_id) = needed(
        tree,
        &mut programs,
        &question.init,
        (&NO_INIT, &INIT_DANGLING),
        &mut findings,
    );
    let agent_path = AGENT.to_string_lossy();
    let (agent, agent_id) = needed(
        tree,
        &mut programs,
        &agent_path,
        (&NO_AGENT, &NO_AGENT),
        &mut findings,
    );
    if let (Some(init), Some(agent)) = (init_id, agent_id)
        && let (Some(init), Some(executable)) =
            (programs.executable(init), programs.executable(agent))
        && init.machine != executable.machine
    {
        let value = format!(
            "ELF machine {}; the init's is {}",
            executable.machine, init.machine
        );
        findings.push(Finding::new(&WRONG_MACHINE, tree.path(agent)).value(value));
    }
    let started: Vec<Id> = [init_id, agent_id].into_iter().flatten().collect();
    let arch = started
        .iter()
        .find_map(|id| Arch::of_elf_machine(programs.executable(*id)?.machine));
    findings.extend(programs.others(&started, arch));
    if let Some(arch) = arch {
        machines::check(tree, arch, &mut findings);
    }
    let root = DriverRoot::of(tree, question);
    let mut modules = modules::check(tree, &root, question.release.as_deref());
    let driver_elsewhere = !modules.is_builtin() && !driver_parts::is_there(tree, &root);
    if driver_elsewhere {
        modules
            .findings
            .retain(|finding| ![&NO_DRIVER, &NO_MODULES].contains(&finding.rule));
        findings.push(Finding::new(&DRIVER_ELSEWHERE, ""));
    }
    findings.append(&mut modules.findings);
    let mut user_space = None;
    if question.user_space && !driver_elsewhere {
        user_space = driver_parts::user_space(tree, modules.driver.as_ref(), &mut findings);
        if let Some(driver) = &modules.driver {
            driver_parts::firmware(tree, &root, driver, &modules.releases, &mut findings);
        }
        if user_space.is_some() {
            let version = modules.driver.as_ref().and_then(|d| d.version.as_deref());
            driver_parts::listed(
                tree,
                &root,
                version.or(user_space.as_deref()),
                &mut findings,
            );
        }
    }
    let services = (question.user_space && !driver_elsewhere)
        .then(|| Services::look(tree, &mut programs, question.release.as_deref()));
    match &services {
        Some(services) => findings.extend(services.findings(question)),
        None => findings.extend(question.topologies.iter().map(|topology| {
            let value = "not known: services come with the driver, which is not in the image";
            Finding::new(&SERVICE_MISSING, topology.to_string()).value(value)
        })),
    }
    paths::places(tree, &mut findings);
    paths::permissions(tree, &mut findings);
    paths::entries(image, tree, &mut findings);
    if let Some(State::Wrong(why)) = &question.hash_tree {
        findings.push(Finding::new(&HASH_TREE, "").value(why));
    }
    findings.sort_by(|a, b| {
        (a.rule.severity, a.rule.name, &a.path).cmp(&(b.rule.severity, b.rule.name, &b.path))
    });
    Report {
        form: image.form(),
        bytes: image.bytes,
        entries: image.entries.len(),
        init,
        agent,
        releases: modules.releases,
        modules: modules.count,
        driver: modules.driver,
        user_space,
        driver_elsewhere,
        services,
        sizes: components::sizes(tree),
        hash_tree: question.hash_tree.clone(),
        findings,
    }
}

/// Reasons why a program cannot start; empty if the file is no ELF file.
pub fn faults(tree: &Tree, path: &str) -> Vec<String> {
    let faults = tree
        .find(path)
        .map(|id| Programs::new(tree).faults(id))
        .unwrap_or_default();
    faults.into_iter().filter_map(|fault| fault.value).collect()
}

/// A program that must exist and start; `rules`: for a missing program, and for a dangling link.
fn needed(
    tree: &Tree,
    programs: &mut Programs,
    path: &str,
    rules: (&'static Rule, &'static Rule),
    findings: &mut Vec<Finding>,
) -> (Needed, Option<Id>) {
    let mut needed = Needed {
        path: escaped(path.as_bytes()),
        file: None,
        bytes: 0,
        linked: "",
    };
    let Some(id) = tree.find(path) else {
        let rule = if tree.find_no_follow(path).is_some() {
            rules.1
        } else {
            rules.0
        };
        findings.push(Finding::new(rule, path));
        return (needed, None);
    };
    needed.file = Some(escaped(&tree.path(id)));
    let not_a_program = |value: String| Finding::new(&NOT_A_PROGRAM, path).value(value);
    let mode = tree.meta(id).mode;
    let Some(content) = tree.content(id).filter(|_| tree.kind(id) == Kind::File) else {
        findings.push(not_a_program(format!("a {}", tree.kind(id).name())));
        return (needed, None);
    };
    needed.bytes = content.length;
    if mode & 0o111 == 0 {
        findings.push(not_a_program(format!("mode {:04o}", mode & 0o7777)));
    }
    if let Some(executable) = programs.executable(id) {
        needed.linked = match (&executable.interpreter, executable.packed) {
            (_, true) => "packed",
            (None, false) => "static",
            (Some(_), false) => "dynamic",
        };
        findings.extend(programs.faults(id));
        return (needed, Some(id));
    }
    if programs::script(content).is_some() {
        needed.linked = "script";
        findings.extend(script(tree, programs, path, id));
    } else {
        findings.push(not_a_program("neither an ELF file nor a script".into()));
    }
    (needed, Some(id))
}

impl Report {
    pub fn boots(&self) -> bool {
        self.findings
            .iter()
            .all(|f| f.rule.severity != Severity::Error)
    }

    /// Numbers of findings by severity.
    pub fn counts(&self) -> String {
        let count = |severity: Severity| {
            let n = self.findings.iter().filter(|f| f.rule.severity == severity);
            match n.count() {
                1 => format!("1 {}", severity.name()),
                n => format!("{n} {}s", severity.name()),
            }
        };
        [Severity::Error, Severity::Warning, Severity::Note]
            .map(count)
            .join(", ")
    }

    /// The report as JSON.
    pub fn json(&self) -> Value {
        json!({
            "boots": self.boots(),
            "form": self.form.name(),
            "bytes": self.bytes,
            "entries": self.entries,
            "init": self.init,
            "agent": self.agent,
            "kernels": self.releases,
            "modules": self.modules,
            "driver": self.driver,
            "userSpace": self.user_space,
            "driverElsewhere": self.driver_elsewhere,
            "services": self.services.as_ref().map(Services::json),
            "components": sizes_json(&self.sizes),
            "hashTree": self.hash_tree.as_ref().map(State::name),
            "findings": self.findings.iter().map(Finding::json).collect::<Vec<_>>(),
        })
    }
}
