//! An init that does what the agent punishes: `hardware.init=/trap-init trap_init.trap=NAME`. It
//! mounts what a guest needs, publishes a spec with one device, "0", does the one thing that the
//! name says, and becomes the agent. With `none` it does nothing wrong.

use crate::agent::cdi;
use crate::minimal_init::{become_agent, reopen_console};
use kata_gpu_init::config::module_parameters;
use kata_gpu_init::machine::mounts;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{SigSet, Signal};
use std::error::Error;
use std::fs;
use std::path::Path;

/// Deed that the agent punishes.
type Deed = fn() -> Result<(), Box<dyn Error>>;

/// Name and deed of each trap.
const TRAPS: &[(&str, Deed)] = &[
    ("none", || Ok(())),
    ("session", || Ok(nix::unistd::setsid().map(drop)?)),
    ("ptmx", || Ok(fs::remove_file("/dev/ptmx")?)),
    ("root", root_in_a_plain_directory),
    ("sigchld", || {
        Ok(SigSet::from(Signal::SIGCHLD).thread_block()?)
    }),
    ("run", run_of_another_type),
];

pub fn run() -> ! {
    let mounted = mounts::make(mounts::EARLY);
    reopen_console();
    for error in mounted {
        println!("trap-init: {error}");
    }
    let command_line = fs::read("/proc/cmdline").unwrap_or_default();
    let parameters = module_parameters(&command_line, "trap_init");
    let name = parameters.strip_prefix("trap=").unwrap_or("none");
    let done = match TRAPS.iter().find(|(n, _)| *n == name) {
        Some((_, trap)) => publish().and_then(|()| trap()),
        None => Err(format!(
            "no such trap, want one of {:?}",
            TRAPS.iter().map(|(n, _)| n).collect::<Vec<_>>()
        )
        .into()),
    };
    match done {
        Ok(()) => println!("trap-init: {name}: done"),
        Err(error) => println!("trap-init: {name}: {error}"),
    }
    become_agent()
}

/// A device that any guest has: the agent resolves it as soon as it finds the file.
fn publish() -> Result<(), Box<dyn Error>> {
    let node = r#"{"path":"/dev/zero","type":"c","major":1,"minor":5,"fileMode":438}"#;
    let spec = format!(
        r#"{{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{{"name":"0","containerEdits":{{"deviceNodes":[{node}]}}}}]}}"#
    );
    fs::create_dir_all(cdi::DIRECTORY)?;
    Ok(fs::write(
        Path::new(cdi::DIRECTORY).join("nvidia.yaml"),
        spec,
    )?)
}

/// In a chroot to a plain directory `/` is not a mount point.
fn root_in_a_plain_directory() -> Result<(), Box<dyn Error>> {
    fs::create_dir_all("/plain/usr/bin")?;
    fs::copy("/usr/bin/kata-agent", "/plain/usr/bin/kata-agent")?;
    nix::unistd::chroot("/plain")?;
    Ok(std::env::set_current_dir("/")?)
}

/// The agent takes only a tmpfs on /run for its own, and covers anything else.
fn run_of_another_type() -> Result<(), Box<dyn Error>> {
    umount2("/run", MntFlags::empty())?;
    mount(
        Some("ramfs"),
        "/run",
        Some("ramfs"),
        MsFlags::MS_NOSUID | MsFlags::MS_NODEV,
        None::<&str>,
    )?;
    publish()
}
