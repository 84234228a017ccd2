//! Waits in a guest while its host maps a BAR. Guest half: each probe calls something again and
//! again from the first CPU while the last one turns on memory decoding of a function.

use super::guest::wait_for;
use crate::agent::log;
use kata_gpu_init::machine::clock::boottime_ns;
use kata_gpu_init::machine::sys::grace_period;
use kata_gpu_init::stream::sinks::vsock::HOST_CID;
use kata_gpu_wire::names;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, connect, socket};
use nix::unistd::Pid;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Message of a probe's line: its name, the time that decoding took to come on and the longest call
/// within it, both in ms; `absent`, with the reason, for what this guest does not have.
pub const MESSAGE: &str = "stall";
/// Message of the line behind the last probe.
pub const OVER: &str = "stalls over";
/// PCI address of the function whose decoding is turned off and on.
const PARAMETER: &str = "testagent.function=";
/// A port that nobody listens on: the host refuses the connection.
const PORT: u32 = 1;
/// File of a guest that has a folder of its host.
const SHARED: &str = "/run/shared";
const PAUSE: Duration = Duration::from_millis(5);
/// Measurements of something that does not wait.
const TRIES: usize = 5;
/// Calls of a probe at most.
const MOST_CALLS: usize = 20_000;
/// Offset of the command register in config space, and its bit for memory decoding.
const COMMAND: (u64, u16) = (4, 2);

type Call = Box<dyn FnMut() -> io::Result<()> + Send>;

/// Something that a guest does.
pub struct Probe {
    pub name: &'static str,
    /// Whether it waits for the end of the mapping.
    pub waits: bool,
    cpu: Cpu,
    make: fn() -> io::Result<Call>,
}

/// The CPU that a probe runs on.
#[derive(Clone, Copy)]
enum Cpu {
    First,
    /// The one that maps.
    Last,
}

const fn probe(name: &'static str, waits: bool, cpu: Cpu, make: fn() -> io::Result<Call>) -> Probe {
    Probe {
        name,
        waits,
        cpu,
        make,
    }
}

/// `waits` is as seen under QEMU 11.1.3 with KVM on the emulated host. An access that QEMU carries
/// out itself needs its global lock, which the mapping holds; vhost-vsock and virtio-fs have
/// processes or threads of their own.
pub const PROBES: &[Probe] = &[
    probe("the mapping CPU's timer", true, Cpu::Last, timer),
    probe("another CPU's timer", false, Cpu::First, timer),
    probe("an RCU grace period", true, Cpu::First, || {
        Ok(Box::new(|| Ok(grace_period()?)))
    }),
    probe("a mount and its end", true, Cpu::First, mount_and_end),
    probe("a TLB flush for both CPUs", true, Cpu::First, tlb_flush),
    probe("PCI config space", true, Cpu::First, config_space),
    probe("a line on ttyS0", true, Cpu::First, || line("/dev/ttyS0")),
    probe("a line on hvc0", true, Cpu::First, || line("/dev/hvc0")),
    probe("a disk's block", true, Cpu::First, disk),
    probe("a refused vsock connection", false, Cpu::First, || {
        Ok(Box::new(vsock))
    }),
    probe("a file by virtio-fs", false, Cpu::First, shared_file),
];

fn timer() -> io::Result<Call> {
    Ok(Box::new(|| Ok(())))
}

/// As the creation of a container has several.
fn mount_and_end() -> io::Result<Call> {
    let folder = Path::new("/run/stalls");
    std::fs::create_dir_all(folder)?;
    Ok(Box::new(move || {
        nix::mount::mount(
            None::<&str>,
            folder,
            Some("tmpfs"),
            MsFlags::empty(),
            None::<&str>,
        )?;
        Ok(nix::mount::umount2(folder, MntFlags::MNT_DETACH)?)
    }))
}

/// Flush of a page that threads on both CPUs can have in their TLBs.
fn tlb_flush() -> io::Result<Call> {
    Ok(Box::new(|| {
        let mut pages = vec![1_u8; 1 << 20];
        std::hint::black_box(&mut pages);
        Ok(())
    }))
}

/// Read of a register of the host bridge; nobody caches those.
fn config_space() -> io::Result<Call> {
    let file = File::open("/sys/bus/pci/devices/0000:00:00.0/config")?;
    Ok(Box::new(move || file.read_exact_at(&mut [0; 4], 0)))
}

fn line(device: &str) -> io::Result<Call> {
    let mut file = OpenOptions::new()
        .write(true)
        .custom_flags(nix::libc::O_NOCTTY)
        .open(device)?;
    Ok(Box::new(move || {
        file.write_all(
            b"a line of eighty characters, as a container's creation has a dozen of them ....\n",
        )
    }))
}

fn disk() -> io::Result<Call> {
    #[repr(align(4096))]
    struct Block([u8; 4096]);
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_DIRECT)
        .open("/dev/vda")?;
    let mut block = Box::new(Block([0; 4096]));
    Ok(Box::new(move || file.read_exact_at(&mut block.0, 0)))
}

fn vsock() -> io::Result<()> {
    let socket = socket(
        AddressFamily::Vsock,
        SockType::Stream,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    match connect(socket.as_raw_fd(), &VsockAddr::new(HOST_CID, PORT)) {
        Err(Errno::ECONNRESET) => Ok(()),
        other => Err(io::Error::other(format!("{other:?} instead of a refusal"))),
    }
}

/// A name that is not there: the host is asked each time.
fn shared_file() -> io::Result<Call> {
    std::fs::create_dir_all(SHARED)?;
    nix::mount::mount(
        Some("shared"),
        SHARED,
        Some("virtiofs"),
        MsFlags::empty(),
        None::<&str>,
    )?;
    let mut count = 0;
    Ok(Box::new(move || {
        count += 1;
        let missing = File::open(Path::new(SHARED).join(format!("none-{count}")))
            .err()
            .map(|error| error.kind());
        if missing == Some(io::ErrorKind::NotFound) {
            Ok(())
        } else {
            Err(io::Error::other(format!("{missing:?}")))
        }
    }))
}

/// Runs the probes one after another once the init has nothing to do.
pub fn run() {
    let Some(function) = super::parameter(PARAMETER) else {
        log::error(
            MESSAGE,
            &[("error", &format!("no {PARAMETER}.. on the command line"))],
        );
        return;
    };
    let config = PathBuf::from(format!("/sys/bus/pci/devices/{function}/config"));
    wait_for(names::SETTLED);
    move_interrupts();
    for probe in PROBES {
        let name = probe.name;
        match probe.measure(&config) {
            Ok(Stall {
                window_ns,
                longest_ns,
                calls,
            }) => {
                let ms = |ns: u64| format!("{:.1}", ns as f64 / 1e6);
                log::info(
                    MESSAGE,
                    &[
                        ("probe", name),
                        ("window_ms", &ms(window_ns)),
                        ("longest_ms", &ms(longest_ns)),
                        ("calls", &calls.to_string()),
                    ],
                );
            }
            Err(error) => log::info(MESSAGE, &[("probe", name), ("absent", &error.to_string())]),
        }
    }
    log::info(OVER, &[]);
}

/// Moves interrupts to the first CPU, as the init does while it enables: what waits for one on a
/// CPU that is gone waits for that CPU, not for the host.
fn move_interrupts() {
    for interrupt in std::fs::read_dir("/proc/irq")
        .into_iter()
        .flatten()
        .flatten()
    {
        // Interrupts of queues that belong to a CPU refuse the write and stay.
        let _unused = std::fs::write(interrupt.path().join("smp_affinity"), "1");
    }
}

struct Stall {
    window_ns: u64,
    /// Longest part of the window that one call and the pause before it took.
    longest_ns: u64,
    calls: usize,
}

impl Stall {
    /// Whether something waited for the end of the window.
    fn waited(&self) -> bool {
        waited(self.longest_ns as f64, self.window_ns as f64)
    }
}

/// Whether something that took `longest` of a `window` waited for its end. What began in its first
/// half waited that long at least; what does not wait takes a few ms on a machine that has time.
pub fn waited(longest: f64, window: f64) -> bool {
    longest > window / 2.0
}

impl Probe {
    /// Measures once, or, of what does not wait, until it did not: a busy machine can hold it up.
    fn measure(&self, config: &Path) -> io::Result<Stall> {
        let mut call = (self.make)()?;
        let mut stall = measure(&mut call, self.cpu, config)?;
        for _ in 1..TRIES {
            if self.waits || !stall.waited() {
                break;
            }
            stall = measure(&mut call, self.cpu, config)?;
        }
        Ok(stall)
    }
}

fn measure(call: &mut Call, cpu: Cpu, config: &Path) -> io::Result<Stall> {
    let last = std::thread::available_parallelism()?.get() - 1;
    call()?;
    let over = AtomicBool::new(false);
    let cpu = match cpu {
        Cpu::First => 0,
        Cpu::Last => last,
    };
    let (calls, window) = std::thread::scope(|scope| {
        let calls = scope.spawn(|| calls_until(&over, call, cpu));
        let window = scope.spawn(|| decode_again(config, last)).join();
        over.store(true, Ordering::Release);
        (calls.join(), window)
    });
    let panicked = |_| io::Error::other("a thread panicked");
    let (calls, (from, to)) = (calls.map_err(panicked)??, window.map_err(panicked)??);
    let longest = calls
        .iter()
        .map(|(start, end)| (*end).min(to).saturating_sub((*start).max(from)))
        .max();
    Ok(Stall {
        window_ns: to - from,
        longest_ns: longest.unwrap_or(0),
        calls: calls.len(),
    })
}

/// Calls from one CPU until the flag says that it is over; returns the begin and end of each call,
/// in ns.
fn calls_until(over: &AtomicBool, call: &mut Call, cpu: usize) -> io::Result<Vec<(u64, u64)>> {
    stay_on(cpu)?;
    // One that grew would flush the TLB of the CPU that is gone.
    let mut calls = Vec::with_capacity(MOST_CALLS);
    while calls.len() < MOST_CALLS && !over.load(Ordering::Acquire) {
        let from = boottime_ns();
        std::thread::sleep(PAUSE);
        call()?;
        calls.push((from, boottime_ns()));
    }
    Ok(calls)
}

/// Turns memory decoding off and on; returns begin and end of turning it on, in ns.
fn decode_again(config: &Path, cpu: usize) -> io::Result<(u64, u64)> {
    stay_on(cpu)?;
    let file = OpenOptions::new().read(true).write(true).open(config)?;
    let mut command = [0; 2];
    file.read_exact_at(&mut command, COMMAND.0)?;
    let on = u16::from_le_bytes(command) | COMMAND.1;
    file.write_all_at(&(on & !COMMAND.1).to_le_bytes(), COMMAND.0)?;
    std::thread::sleep(20 * PAUSE);
    let from = boottime_ns();
    file.write_all_at(&on.to_le_bytes(), COMMAND.0)?;
    Ok((from, boottime_ns()))
}

fn stay_on(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}
