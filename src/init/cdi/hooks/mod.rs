//! Hooks of containers: this program under the name `nvidia-cdi-hook`, or with `hook` as its first
//! word, started by kata-agent for one container.
//!
//! The commands and flags are those of the incumbent's hook; [`arguments`] has them. Each job of a
//! hook reads and decides first, then makes all its edits or none ([`edits`]), through the
//! container's root ([`container_root`]) alone; a failed job does not stop the others. Reads from
//! an image are bounded in size and in time. Nothing from the image is executed, loaded or mounted;
//! the environment is ignored. kata-agent logs a hook's failure and starts the container all the
//! same: the only trace is the line on standard error.

pub mod arguments; // the command line
mod container_libraries; // libraries of the container
pub mod container_root; // reading in the container
mod disable_device_node_modification;
pub mod edits; // writing in the container
pub mod enable_cuda_compat;
mod ld_so_conf; // directories of its loader
pub mod oci_state; // which container
mod update_application_profile;
mod update_ldcache;

use arguments::{Arguments, Command, Meaning};
use container_root::ContainerRoot;
use edits::Edit;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use update_ldcache::Plan;

pub use disable_device_node_modification::cover;

/// The incumbent's name, under which specs start the hook.
pub const NAME: &str = "nvidia-cdi-hook";
/// Score with which the OOM killer chooses the hook first.
const OOM_SCORE: &str = "1000";
/// Directory that exists only in a guest booted by this program.
const GUEST: &str = "/run/kata-gpu-init";

/// Result of a hook.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Number of files and links made, replaced or removed.
    pub edits: usize,
    /// Problems that did not stop the hook.
    pub notes: Vec<String>,
}

/// Arguments of a hook, if this program was started as one. PID 1 is a hook by its name alone: its
/// arguments are unknown words of the kernel command line.
pub fn invocation(
    words: impl IntoIterator<Item = OsString>,
    is_init: bool,
) -> Option<Vec<OsString>> {
    let mut words = words.into_iter();
    let name = words.next()?;
    if Path::new(&name).file_name().is_some_and(|n| n == NAME) {
        return Some(words.collect());
    }
    words
        .next()
        .filter(|w| w == "hook" && !is_init)
        .map(|_| words.collect())
}

/// Runs a hook and logs its result.
pub fn main(words: Vec<OsString>) -> ExitCode {
    // Files and links for a container get these modes, whatever the runtime's umask is.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    // The image decides how much a hook reads: if memory is short, kill the hook rather than the
    // agent or the init. Without /proc, the score stays.
    crate::machine::sys::set_oom_score(OOM_SCORE);
    let words: Result<Vec<String>, OsString> =
        words.into_iter().map(OsString::into_string).collect();
    let result = words
        .map_err(|w| format!("{w:?} is not text"))
        .and_then(|words| run(&words, io::stdin().lock()));
    match result {
        Ok(outcome) => {
            outcome.notes.iter().for_each(|note| log(note));
            ExitCode::SUCCESS
        }
        Err(error) => {
            log(&error);
            ExitCode::FAILURE
        }
    }
}

/// Prints a line on standard error, and in our guest also in the kernel log: the agent does not
/// pass on the output of such hooks.
fn log(line: &str) {
    let line: String = line
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(1000)
        .collect();
    // A runtime may have closed its end: the kernel log has the line, too.
    let _unused = writeln!(io::stderr(), "{NAME}: {line}");
    if Path::new(GUEST).is_dir() {
        let _unused = crate::machine::kernel_log::write(
            4,
            &format!(
                "kata-gpu-init: {NAME}: \
                {line}"
            ),
        ); // without /dev/kmsg there is no third place
    }
}

/// Runs the hook named by these arguments (without the program's name), with the container's state
/// on `input`. An error states hook, step and value.
pub fn run(words: &[String], input: impl Read + AsFd) -> Result<Outcome, String> {
    match arguments::parse(words)? {
        Meaning::Help => print!(
            "{NAME}: hooks of containers, for kata-agent to run with the container's state on \
                standard input\n\n{}",
            arguments::help()
        ),
        Meaning::Version => println!("{NAME} {}", env!("CARGO_PKG_VERSION")),
        // Succeed, as the incumbent does: a spec of a later generator must not keep containers from
        // starting.
        Meaning::Unsupported(None) => {
            return Ok(Outcome {
                edits: 0,
                notes: vec!["no hook is named; --help lists them".into()],
            });
        }
        Meaning::Unsupported(Some(name)) => {
            return Ok(Outcome {
                edits: 0,
                notes: vec![format!(
                    "unsupported hook {name:?}: nothing is done; --help lists those there are"
                )],
            });
        }
        Meaning::Run(command, arguments) => {
            return perform(command, &arguments, input).map_err(|e| format!("{command}: {e}"));
        }
    }
    Ok(Outcome::default())
}

fn perform(
    command: Command,
    arguments: &Arguments,
    input: impl Read + AsFd,
) -> io::Result<Outcome> {
    match command {
        Command::Noop => return Ok(Outcome::default()),
        Command::Chmod => {
            return Err(io::Error::other(
                "refused: it changes the mode of whatever the image has at a path; device nodes \
                    get their mode from the spec: remove this hook",
            ));
        }
        Command::EnableCudaCompat
            if arguments.host_driver_version.is_empty()
                && arguments.host_cuda_version.is_empty() =>
        {
            return Ok(Outcome::default());
        }
        _ => {}
    }
    let state = match &arguments.container_spec {
        Some(path) => oci_state::read_regular(path, oci_state::MAX_STATE)?,
        None => oci_state::read_state(input)?,
    };
    let root = ContainerRoot::open(&oci_state::root_of(&state)?)?;
    let mut jobs = Jobs {
        root: &root,
        edits: 0,
        notes: Vec::new(),
        errors: Vec::new(),
    };
    let links = || {
        arguments
            .links
            .iter()
            .map(|l| Edit::Link {
                path: l.path.clone(),
                target: l.target.clone(),
            })
            .collect()
    };
    match command {
        Command::CreateSymlinks => _ = jobs.run(|plan| set(plan, links())),
        Command::UpdateLdcache => {
            _ = jobs.run(|plan| update_ldcache::plan(&root, &arguments.folders, &[], None, plan))
        }
        Command::EnableCudaCompat => {
            _ = jobs.run(|plan| {
                enable_cuda_compat::plan(&root, arguments, plan);
                Ok(())
            })
        }
        Command::UpdateApplicationProfile => {
            _ = jobs.run(|plan| set(plan, update_application_profile::plan(&root)?))
        }
        Command::DisableDeviceNodeModification => disable_device_node_modification::run(&root)?,
        Command::Prepare => {
            // Run this job first, before anything of the image is read: even if the rest fails, the
            // container changes no device node.
            if let Err(error) = disable_device_node_modification::run(&root) {
                jobs.notes.push(format!(
                    "prepare: {error}: programs in the container may try to change device nodes"
                ));
            }
            let linked = jobs.run(|plan| set(plan, links()));
            let compat = jobs.run(|plan| {
                enable_cuda_compat::plan(&root, arguments, plan);
                Ok(())
            });
            let driver = Some(arguments.host_driver_version.as_str()).filter(|v| !v.is_empty());
            let links = if linked.is_some() {
                &arguments.links[..]
            } else {
                &[]
            };
            jobs.run(|plan| {
                // These edits are made already; do not repeat them.
                plan.edits = compat.unwrap_or_default();
                update_ldcache::plan(&root, &arguments.folders, links, driver, plan)
            });
            jobs.run(|plan| set(plan, update_application_profile::plan(&root)?));
        }
        Command::Chmod | Command::Noop => {} // answered above
    }
    jobs.end()
}

fn set(plan: &mut Plan, edits: Vec<Edit>) -> io::Result<()> {
    plan.edits = edits;
    Ok(())
}

/// Jobs of one hook.
struct Jobs<'a> {
    root: &'a ContainerRoot,
    edits: usize,
    notes: Vec<String>,
    errors: Vec<String>,
}

impl Jobs<'_> {
    /// Plans one job and makes its edits, all or none; returns them. Keeps a failure for the end.
    fn run(&mut self, plan: impl FnOnce(&mut Plan) -> io::Result<()>) -> Option<Vec<Edit>> {
        let mut planned = Plan::default();
        let made = plan(&mut planned).and_then(|()| edits::apply(self.root, &planned.edits));
        self.notes.append(&mut planned.notes);
        match made {
            Ok(count) => {
                self.edits += count;
                Some(planned.edits)
            }
            Err(error) => {
                self.errors.push(error.to_string());
                None
            }
        }
    }

    /// Error: all failed jobs, and the notes of all jobs.
    fn end(mut self) -> io::Result<Outcome> {
        if self.errors.is_empty() {
            return Ok(Outcome {
                edits: self.edits,
                notes: self.notes,
            });
        }
        self.errors.append(&mut self.notes);
        Err(io::Error::other(self.errors.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_kernel_command_line_make_no_hook_of_pid_1() {
        let of = |words: &[&str], is_init| {
            invocation(words.iter().map(OsString::from), is_init).map(|words| words.len())
        };
        assert_eq!(of(&["/init", "hook", "prepare"], true), None);
        assert_eq!(of(&["/init", "hook", "prepare"], false), Some(1));
        // Names under which our spec starts the hook, possibly in a new PID namespace.
        assert_eq!(of(&["nvidia-cdi-hook", "prepare"], true), Some(1));
        assert_eq!(of(&["/usr/bin/nvidia-cdi-hook", "prepare"], false), Some(1));
        assert_eq!(of(&["/init"], false), None);
    }
}
