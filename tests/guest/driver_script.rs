//! `/driver-script`: a PID 1 that runs the steps of a script on the kernel command line against a
//! driver, and prints the duration of each. Of the product it has parsers and ioctls only, so that
//! the durations are the driver's: the simulated one's, or NVIDIA's.
//!
//! `driverscript=STEP[,STEP..]`; a step is one of
//!
//! | step | what it does |
//! |---|---|
//! | `load` | loads `nvidia.ko` with the command line's parameters, and makes a node for each GPU |
//! | `serial` | opens each GPU, one after another, and keeps it open |
//! | `parallel` | opens all at once, a thread for each |
//! | `nonblock` | opens all with O_NONBLOCK, then waits for each |
//! | `twice` | opens GPU 0 without waiting, then once more with waiting, and then GPU 1: the second open holds the third up |
//! | `close` | closes all that is open |
//! | `power` | reads GPU 0's `power` file while it initialises |
//! | `sleep:MS` | waits |
//!
//! Output is one line a step: `driver-script:
//! {"step":..,"ms":..,"gpus":[{"gpu":..,"ms":..,"errno":..,"rc":..,"status":..,"sim":..}]}`; `sim`
//! are the simulator's counters of that GPU at the step's end, and `first` GPU 0's when the call
//! returned.

use kata_gpu_init::config::module_parameters;
use kata_gpu_init::gpu::driver_proc::{information, majors};
use kata_gpu_init::machine::sys::wait_open_complete;
use nix::fcntl::{OFlag, open};
use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::{Value, json};
use std::ffi::CString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

pub fn run() -> ! {
    for (source, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        if let Err(errno) = mount(
            Some(source),
            target,
            Some(source),
            MsFlags::empty(),
            None::<&str>,
        ) {
            println!("driver-script: mount {target}: {errno}");
        }
    }
    let command_line = std::fs::read("/proc/cmdline").unwrap_or_default();
    let text = String::from_utf8_lossy(&command_line).into_owned();
    let steps = text
        .split_ascii_whitespace()
        .find_map(|w| w.strip_prefix("driverscript="))
        .unwrap_or_default();
    let mut script = Script {
        command_line,
        gpus: Vec::new(),
        open: Vec::new(),
    };
    for step in steps.split(',') {
        let start = Instant::now();
        let result = script.step(step);
        let ms = start.elapsed().as_secs_f64() * 1e3;
        match result {
            Ok(gpus) => println!(
                "driver-script: {}",
                json!({ "step": step, "ms": ms, "gpus": gpus })
            ),
            Err(error) => println!(
                "driver-script: {}",
                json!({ "step": step, "ms": ms, "error": error })
            ),
        }
    }
    println!("driver-script: end");
    // A hanging close must not keep the guest: the machine goes off under it.
    let _unused = reboot(RebootMode::RB_POWER_OFF);
    std::process::exit(1)
}

struct Script {
    command_line: Vec<u8>,
    /// Node of each GPU, in PCI order.
    gpus: Vec<String>,
    open: Vec<OwnedFd>,
}

impl Script {
    fn step(&mut self, step: &str) -> Result<Vec<Value>, String> {
        let (what, argument) = step.split_once(':').unwrap_or((step, ""));
        match what {
            "load" => self.load(),
            "serial" => Ok((0..self.gpus.len())
                .map(|k| self.open_blocking(k))
                .collect()),
            "parallel" => {
                let results: Vec<_> = std::thread::scope(|scope| {
                    let threads: Vec<_> = self
                        .gpus
                        .iter()
                        .map(|node| scope.spawn(move || timed_open(node, OFlag::empty())))
                        .collect();
                    threads.into_iter().filter_map(|t| t.join().ok()).collect()
                });
                Ok(results
                    .into_iter()
                    .enumerate()
                    .map(|(k, (fd, value))| self.keep(k, fd, value))
                    .collect())
            }
            "nonblock" => {
                let start = Instant::now();
                let opened: Vec<_> = self
                    .gpus
                    .iter()
                    .map(|node| timed_open(node, OFlag::O_NONBLOCK))
                    .collect();
                let waits: Vec<Value> = std::thread::scope(|scope| {
                    let threads: Vec<_> = opened
                        .iter()
                        .map(|(fd, _)| scope.spawn(move || fd.as_ref().map(|fd| waited(fd, start))))
                        .collect();
                    threads
                        .into_iter()
                        .map(|t| t.join().ok().flatten().unwrap_or_default())
                        .collect()
                });
                let mut all = Vec::new();
                for (k, ((fd, mut value), wait)) in opened.into_iter().zip(waits).enumerate() {
                    value["open_ms"] = value["ms"].take();
                    for key in ["ms", "rc", "status"] {
                        value[key] = wait[key].clone();
                    }
                    all.push(self.keep(k, fd, value));
                }
                Ok(all)
            }
            "twice" => self.twice(),
            "close" => {
                self.open.clear();
                Ok(vec![])
            }
            "power" => {
                let gpu = gpu_addresses().into_iter().next().ok_or("power: no GPU")?;
                let (fd, _) = timed_open(&self.gpus[0], OFlag::O_NONBLOCK);
                // The driver's own thread initialises; before it has begun there is nothing to wait
                // for.
                while !counters(&gpu).contains("adapter: initialising") {
                    std::thread::yield_now();
                }
                let power =
                    std::fs::read_to_string(format!("/proc/driver/nvidia/gpus/{gpu}/power"));
                self.open.extend(fd);
                Ok(vec![
                    json!({ "first": counters(&gpu), "read": power.is_ok() }),
                ])
            }
            "sleep" => {
                std::thread::sleep(std::time::Duration::from_millis(
                    argument.parse().map_err(|e| format!("{step}: {e}"))?,
                ));
                Ok(vec![])
            }
            other => Err(format!("{other:?} is no step")),
        }
    }

    fn load(&mut self) -> Result<Vec<Value>, String> {
        let release =
            std::fs::read_to_string("/proc/sys/kernel/osrelease").map_err(|e| e.to_string())?;
        let file = File::open(format!("/lib/modules/{}/nvidia.ko", release.trim()))
            .map_err(|e| e.to_string())?;
        let parameters = module_parameters(&self.command_line, "nvidia");
        let parameters = CString::new(parameters.trim()).map_err(|e| e.to_string())?;
        finit_module(&file, &parameters, ModuleInitFlags::empty())
            .map_err(|errno| format!("load: {errno}"))?;
        let major = majors(Path::new("/proc"))
            .map_err(|e| e.to_string())?
            .nvidia
            .ok_or("no major")?;
        let mut all = Vec::new();
        for address in gpu_addresses() {
            let minor = information(Path::new("/proc"), address.parse().map_err(|_| "address")?)
                .map_err(|e| e.to_string())?
                .minor;
            let node = format!("/dev/nvidia{minor}");
            mknod(
                Path::new(&node),
                SFlag::S_IFCHR,
                Mode::from_bits_truncate(0o666),
                makedev(major.into(), minor.into()),
            )
            .map_err(|e| e.to_string())?;
            all.push(json!({ "gpu": address, "minor": minor }));
            self.gpus.push(node);
        }
        Ok(all)
    }

    fn open_blocking(&mut self, k: usize) -> Value {
        let (fd, value) = timed_open(&self.gpus[k], OFlag::empty());
        self.keep(k, fd, value)
    }

    fn keep(&mut self, k: usize, fd: Option<OwnedFd>, mut value: Value) -> Value {
        value["gpu"] = k.into();
        let address = gpu_addresses().into_iter().nth(k).unwrap_or_default();
        value["sim"] = counters(&address).into();
        self.open.extend(fd);
        value
    }

    /// The convoy: whoever opens, with waiting, a GPU that initialises, holds the list of GPUs
    /// while it waits.
    fn twice(&mut self) -> Result<Vec<Value>, String> {
        let [first, second] = [self.gpus[0].clone(), self.gpus[1].clone()];
        let (fd, _) = timed_open(&first, OFlag::O_NONBLOCK);
        self.open.extend(fd);
        let gpu = gpu_addresses().into_iter().next().unwrap_or_default();
        let open = |node: &str, flags| {
            let (fd, mut value) = timed_open(node, flags);
            value["first"] = counters(&gpu).into();
            (fd, value)
        };
        let (again, other) = std::thread::scope(|scope| {
            let again = scope.spawn(|| open(&first, OFlag::empty()));
            // The second open must be in the driver before the third comes: nothing shows that from
            // outside.
            std::thread::sleep(std::time::Duration::from_millis(50));
            let other = scope.spawn(|| open(&second, OFlag::O_NONBLOCK));
            (again.join(), other.join())
        });
        let mut all = Vec::new();
        for (k, result) in [again, other].into_iter().enumerate() {
            let (fd, value) = result.map_err(|_| "a thread has panicked")?;
            all.push(self.keep(k, fd, value));
        }
        Ok(all)
    }
}

fn gpu_addresses() -> Vec<String> {
    let mut all: Vec<String> = std::fs::read_dir("/proc/driver/nvidia/gpus")
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    all.sort();
    all
}

/// The simulator's counters of a GPU; none of NVIDIA's driver.
fn counters(gpu: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/driver/nvidia/gpus/{gpu}/sim"));
    let text = text.unwrap_or_default();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn timed_open(node: &str, flags: OFlag) -> (Option<OwnedFd>, Value) {
    let start = Instant::now();
    let result = open(
        Path::new(node),
        OFlag::O_RDWR | OFlag::O_CLOEXEC | flags,
        Mode::empty(),
    );
    let ms = start.elapsed().as_secs_f64() * 1e3;
    match result {
        Ok(fd) => (Some(fd), json!({ "ms": ms })),
        Err(errno) => (None, json!({ "ms": ms, "errno": format!("{errno:?}") })),
    }
}

fn waited(fd: &OwnedFd, start: Instant) -> Value {
    match wait_open_complete(fd) {
        Ok(answer) => {
            json!({ "ms": start.elapsed().as_secs_f64() * 1e3, "rc": answer.rc,
                "status": answer.adapter_status })
        }
        Err(errno) => {
            json!({ "ms": start.elapsed().as_secs_f64() * 1e3, "rc": format!("{errno:?}") })
        }
    }
}
