//! `/hardware`: what a Kata kernel has built in and the test kernel has as modules. The kernel
//! starts it as PID 1 (`rdinit=/hardware`); it loads the modules of `/etc/hardware.modules` in
//! order, with their parameters of the kernel command line, leaves no trace but a line in the
//! kernel's log, and becomes `/init` (`hardware.init=` names another program). `hardware.file=` and
//! `hardware.directory=` make one in the kernel's /dev, which is there before anybody mounts it: a
//! device that only such hardware has, or something in the way. `hardware.override=` gives every
//! GPU that driver_override, as somebody who wants to keep them for another driver does.
//! `hardware.root=DEVICE:TYPE` mounts a disk read-only as the root, as a Kata kernel does with
//! `root=` and `ro`, with the modules of `/etc/hardware.root-modules`, and becomes its
//! `/sbin/init`; `dm-mod.create=` makes a device before that. `hardware.descriptors=none` closes 0
//! to 2. `hardware.kill=NAME:MS` leaves a process that kills the one of that name (as in
//! /proc/PID/comm) so many milliseconds later. `hardware.acpi=srat` makes ACPI describe memory of
//! the first GPU, as on Grace. `hardware.show=PATH` leaves a process that writes that file to hvc0
//! whenever it has changed, as one line of JSON.

use crate::dm_init;
use crate::halves::script::process_named;
use kata_gpu_init::config::{module_parameters, parameter_value};
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::ffi::{CStr, CString};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

const LIST: &str = "/etc/hardware.modules";
const ROOT_LIST: &str = "/etc/hardware.root-modules";
/// Path that a kernel tries first in a root on a disk.
const ROOT_INIT: &CStr = c"/sbin/init";

pub fn run() -> ! {
    let command_line = read_command_line();
    load_all(LIST, &command_line);
    if command_line
        .split(u8::is_ascii_whitespace)
        .any(|word| word == b"console=hvc0")
        && let Err(error) = await_console()
    {
        say(&format!("hardware: console=hvc0: {error}"));
    }
    for (word, directory) in device_words(&command_line) {
        if let Err(error) = make_device(&word, directory) {
            say(&format!("hardware: {word}: {error}"));
        }
    }
    let parameters = module_parameters(&command_line, "hardware");
    if let Some(driver) = parameters
        .split(' ')
        .find_map(|w| w.strip_prefix("override="))
        && let Err(error) = override_driver(driver)
    {
        say(&format!("hardware: override={driver}: {error}"));
    }
    if parameters.split(' ').any(|w| w == "acpi=srat")
        && let Err(error) = describe_memory()
    {
        say(&format!("hardware: acpi=srat: {error}"));
    }
    let mut init = init(&command_line);
    if let Some(root) = parameters.split(' ').find_map(|w| w.strip_prefix("root=")) {
        load_all(ROOT_LIST, &command_line);
        let device = parameter_value(&module_parameters(&command_line, "dm-mod"), "create");
        if let Some(device) = device
            && let Err(error) = in_kernels_dev(|| dm_init::create(&device))
        {
            say(&format!("hardware: dm-mod.create={device}: {error}"));
        }
        match change_root(root) {
            Ok(()) => init = ROOT_INIT.into(),
            Err(error) => say(&format!("hardware: root={root}: {error}")),
        }
    }
    if let Some(word) = parameters.split(' ').find_map(|w| w.strip_prefix("kill="))
        && let Err(error) = leave_killer(word)
    {
        say(&format!("hardware: kill={word}: {error}"));
    }
    if let Some(path) = parameters.split(' ').find_map(|w| w.strip_prefix("show="))
        && let Err(error) = leave(|| show(path))
    {
        say(&format!("hardware: show={path}: {error}"));
    }
    say("hardware: ready");
    if parameters.split(' ').any(|w| w == "descriptors=none") {
        // The kernel starts an init without descriptors when it finds no console.
        for descriptor in 0..=2 {
            let _unused = nix::unistd::close(descriptor);
        }
    }
    // Pass on the words that the kernel has left for its init.
    let words = std::env::args_os()
        .skip(1)
        .filter_map(|word| CString::new(word.into_encoded_bytes()).ok());
    let arguments: Vec<CString> = [init.clone()].into_iter().chain(words).collect();
    let error = nix::unistd::execv(&init, &arguments).err();
    say(&format!("hardware: execute {init:?}: {error:?}"));
    std::process::exit(1)
}

/// Loads the modules of a list, in its order.
fn load_all(list: &str, command_line: &[u8]) {
    let text = std::fs::read_to_string(list).unwrap_or_else(|e| {
        say(&format!("hardware: read {list}: {e}"));
        String::new()
    });
    for path in text.lines().map(str::trim).filter(|l| !l.is_empty()) {
        if let Err(error) = load(path, command_line) {
            say(&format!("hardware: load {path}: {error}"));
        }
    }
}

/// Does something in the kernel's own /dev, which nobody has mounted yet, and leaves it unmounted.
fn in_kernels_dev<T>(act: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    let _unused = std::fs::create_dir_all("/dev");
    mount(
        Some("devtmpfs"),
        "/dev",
        Some("devtmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .map_err(|e| format!("mount /dev: {e}"))?;
    let done = act();
    umount2("/dev", MntFlags::empty()).map_err(|e| format!("unmount /dev: {e}"))?;
    done
}

/// Waits for the port of the console, which comes some time after its driver: a Kata kernel has
/// that driver built in, and the port long before the init.
fn await_console() -> Result<(), String> {
    const LOOKS: u32 = 500;
    in_kernels_dev(|| {
        let opened = || {
            OpenOptions::new()
                .write(true)
                .open("/dev/hvc0")
                .map(drop)
                .map_err(|error| error.to_string())
        };
        for _ in 1..LOOKS {
            if opened().is_ok() {
                return Ok(());
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        opened()
    })
}

/// `DEVICE:TYPE` becomes the root. The init finds nothing mounted, as after a real kernel.
fn change_root(root: &str) -> Result<(), String> {
    let (device, fs) = root.split_once(':').ok_or("want DEVICE:TYPE")?;
    let at = |what: &'static str| move |error: nix::errno::Errno| format!("{what}: {error}");
    let _unused = std::fs::create_dir_all("/root");
    in_kernels_dev(|| {
        mount(
            Some(device),
            "/root",
            Some(fs),
            MsFlags::MS_RDONLY,
            None::<&str>,
        )
        .map_err(at("mount it"))
    })?;
    nix::unistd::chdir("/root").map_err(at("enter it"))?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>)
        .map_err(at("move it to /"))?;
    nix::unistd::chroot(".").map_err(at("make it the root"))?;
    nix::unistd::chdir("/").map_err(at("enter the root"))
}

/// Leaves a child of PID 1, whatever PID 1 becomes.
fn leave(act: impl FnOnce()) -> Result<(), String> {
    let forked = kata_gpu_init::machine::sys::fork_single_threaded((), |()| {
        act();
        0
    });
    forked.map(drop).map_err(|(errno, ())| errno.to_string())
}

fn leave_killer(word: &str) -> Result<(), String> {
    let (name, ms) = word.split_once(':').ok_or("want NAME:MS")?;
    let ms = ms.parse().map_err(|e| format!("{ms}: {e}"))?;
    leave(|| {
        std::thread::sleep(std::time::Duration::from_millis(ms));
        // A process that is about to be started counts as well.
        let killed = loop {
            match process_named(name) {
                Ok(pid) => {
                    break nix::sys::signal::kill(
                        nix::unistd::Pid::from_raw(pid),
                        nix::sys::signal::Signal::SIGKILL,
                    );
                }
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(20)),
            }
        };
        kmsg(&format!("hardware: kill={word}: {killed:?}"));
    })
}

/// Writes a file's text to the console as often as it changes, and once more for each that another
/// writer's line may have torn.
fn show(path: &str) {
    const LOOK: std::time::Duration = std::time::Duration::from_millis(200);
    const TIMES: u32 = 5;
    let (mut shown, mut times) = (String::new(), 0);
    loop {
        if let Ok(text) = std::fs::read_to_string(path) {
            times = if text == shown { times + 1 } else { 0 };
            if times < TIMES
                && let Ok(mut console) = OpenOptions::new().write(true).open("/dev/hvc0")
            {
                let line = serde_json::json!({"file": path, "text": text});
                let _next_time = console.write_all(format!("{line}\n").as_bytes());
            }
            shown = text;
        }
        std::thread::sleep(LOOK);
    }
}

/// The init to become: `/init`, or another one that the command line names with `hardware.init=`.
fn init(command_line: &[u8]) -> CString {
    let parameters = module_parameters(command_line, "hardware");
    let init = parameters.split(' ').find_map(|w| w.strip_prefix("init="));
    init.and_then(|p| CString::new(p).ok())
        .unwrap_or_else(|| c"/init".into())
}

/// Names below /dev, and whether each is to be a directory.
fn device_words(command_line: &[u8]) -> Vec<(String, bool)> {
    let parameters = module_parameters(command_line, "hardware");
    let named = |prefix: &str, directory| {
        let names = parameters
            .split(' ')
            .filter_map(|w| w.strip_prefix(prefix))
            .map(|n| (n.to_string(), directory));
        names.collect::<Vec<_>>()
    };
    [named("file=", false), named("directory=", true)].concat()
}

fn make_device(name: &str, directory: bool) -> Result<(), String> {
    let path = Path::new("/dev").join(name);
    in_kernels_dev(|| {
        let made = if directory {
            std::fs::create_dir(&path)
        } else {
            File::create(&path).map(drop)
        };
        made.map_err(|e| e.to_string())
    })
}

fn override_driver(driver: &str) -> Result<(), String> {
    let _unused = std::fs::create_dir_all("/sys");
    mount(
        Some("sysfs"),
        "/sys",
        Some("sysfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .map_err(|e| e.to_string())?;
    let overridden = kata_gpu_init::gpu::pci::scan(Path::new("/sys"))
        .map_err(|e| e.to_string())
        .and_then(|scan| {
            let file = |gpu: &kata_gpu_init::gpu::pci::Gpu| {
                format!("/sys/bus/pci/devices/{}/driver_override", gpu.address)
            };
            scan.gpus
                .iter()
                .try_for_each(|gpu| std::fs::write(file(gpu), driver))
                .map_err(|e| e.to_string())
        });
    umount2("/sys", MntFlags::MNT_DETACH).map_err(|e| e.to_string())?;
    overridden
}

/// ACPI's table of memory nodes, in place of the firmware's, with one of the first GPU. Stays: the
/// init finds sysfs mounted, which changes nothing for it.
fn describe_memory() -> Result<(), String> {
    let _unused = std::fs::create_dir_all("/sys");
    mount(
        Some("sysfs"),
        "/sys",
        Some("sysfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .map_err(|e| e.to_string())?;
    mount(
        Some("acpi"),
        "/sys/firmware",
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .map_err(|e| e.to_string())?;
    // Header and reserved bytes, then a generic initiator (type 5, 32 bytes) that is a PCI function
    // (1): 0001:00:00.0.
    let mut srat = vec![0; 48];
    srat.extend(
        [5, 32, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0]
            .into_iter()
            .chain([0; 20]),
    );
    std::fs::create_dir_all("/sys/firmware/acpi/tables").map_err(|e| e.to_string())?;
    std::fs::write("/sys/firmware/acpi/tables/SRAT", srat).map_err(|e| e.to_string())
}

fn read_command_line() -> Vec<u8> {
    let _unused = std::fs::create_dir_all("/proc");
    if let Err(errno) = mount(
        Some("proc"),
        "/proc",
        Some("proc"),
        MsFlags::empty(),
        None::<&str>,
    ) {
        say(&format!("hardware: mount /proc: {errno}"));
    }
    let text = std::fs::read("/proc/cmdline").unwrap_or_default();
    // Lazily: the init finds an empty /proc, as after a real kernel.
    let _unused = umount2("/proc", MntFlags::MNT_DETACH);
    text
}

fn load(path: &str, command_line: &[u8]) -> Result<(), String> {
    let name = Path::new(path)
        .file_stem()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    let parameters =
        CString::new(module_parameters(command_line, &name)).map_err(|e| e.to_string())?;
    let file = File::open(path).map_err(|e| e.to_string())?;
    finit_module(&file, &parameters, ModuleInitFlags::empty()).map_err(|errno| errno.to_string())
}

/// To the console the kernel gave PID 1, which may refuse it, and to its log where there is one
/// already.
fn say(text: &str) {
    let _unused = writeln!(std::io::stdout(), "{text}");
    kmsg(text);
}

/// A line in the kernel's log. Without the node there is none: a file of that name must not come to
/// be in its place.
pub fn kmsg(text: &str) {
    let _unused = OpenOptions::new()
        .write(true)
        .open("/dev/kmsg")
        .and_then(|mut log| log.write_all(format!("<6>{text}\n").as_bytes()));
}
