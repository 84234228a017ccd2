//! A failure means that on a real GPU and NVIDIA's driver the init, its hooks or its helper for
//! NVML do otherwise than on the simulator: a container does not compute with CUDA, a killed worker
//! or an Xid costs a GPU, or the spec lacks what `nvidia-ctk` lists. No GPU is bound, reset or set;
//! without one each test is ignored.

mod guest;
mod machine;
mod runc;

use anyhow::{Context, Result, bail, ensure};
use kata_gpu_test_guest::agent::container_run;
use kata_gpu_test_guest::protobuf::bytes_of;
use kata_gpu_tests::agent_client::requests::{self, Container};
use kata_gpu_tests::agent_client::{AGENT, Client};
use kata_gpu_tests::nvidia_programs::{SMI_QUERY, same_as_nvidia_ctk, smi_lines};
use kata_gpu_tests::trials;
use kata_gpu_wire::names;
use kata_gpu_wire::nvml_messages::Answer;
use kata_gpu_wire::pci_address::PciAddress;
use libtest_mimic::{Completion, Trial};
use machine::{Machine, run};
use serde_json::Value;
use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Checks the machine; ignored where it lacks a program that the test needs.
type Test = fn(&Machine) -> Result<Completion>;

const TESTS: [(&str, Test); 8] = [
    (
        "real_gpu_guest_brings_gpus_up_and_containers_compute",
        guest_brings_gpus_up_and_containers_compute,
    ),
    (
        "real_gpu_container_of_kata_agent_computes",
        container_of_kata_agent_computes,
    ),
    (
        "real_gpu_is_held_while_a_killed_worker_is_replaced",
        is_held_while_a_killed_worker_is_replaced,
    ),
    (
        "real_gpu_fault_of_a_program_is_an_xid_and_costs_no_gpu",
        fault_of_a_program_is_an_xid_and_costs_no_gpu,
    ),
    (
        "real_gpu_container_of_runc_computes_with_our_spec",
        container_of_runc_computes_with_our_spec,
    ),
    (
        "real_gpu_spec_has_what_nvidia_ctk_lists",
        spec_has_what_nvidia_ctk_lists,
    ),
    (
        "real_gpu_helper_reports_what_nvidia_smi_reports",
        helper_reports_what_nvidia_smi_reports,
    ),
    (
        "real_gpu_files_of_the_driver_are_read",
        files_of_the_driver_are_read,
    ),
];

fn main() -> ExitCode {
    let trial = |(name, test): (&'static str, Test)| {
        Trial::ignorable_test(name, move || {
            let machine = match Machine::find() {
                Ok(machine) => machine,
                Err(reason) => return Ok(Completion::ignored_with(reason)),
            };
            test(&machine).map_err(|error| format!("{error:#}").into())
        })
    };
    // One at a time: each guest reads and writes the kernel's log.
    trials::run_anywhere(1, TESTS.into_iter().map(trial).collect())
}

/// The value of `KEY=VALUE` in a program's output.
fn said<'a>(output: &'a str, key: &str) -> Vec<&'a str> {
    output
        .lines()
        .filter_map(|line| line.strip_prefix(key)?.strip_prefix('='))
        .collect()
}

/// Checks the output of the CUDA program in a container with these GPUs.
fn computes(output: &str, gpus: &[PciAddress]) -> Result<()> {
    // Sum of i * i + 7 for i below 16384.
    const SUM: &str = "1465881403392";
    let number = gpus.len().to_string();
    ensure!(
        said(output, "gpus") == [number.as_str()],
        "not {number} GPUs: {output}"
    );
    let mut seen: Vec<PciAddress> = said(output, "gpu")
        .iter()
        .filter_map(|gpu| gpu.split(' ').next()?.parse().ok())
        .collect();
    seen.sort();
    ensure!(seen == gpus, "{seen:?} are not {gpus:?}: {output}");
    ensure!(
        said(output, "sum").len() == gpus.len()
            && said(output, "sum").iter().all(|sum| *sum == SUM),
        "a wrong sum: {output}"
    );
    Ok(())
}

/// Whether NVML was asked for a GPU's facts, which is once all has settled.
fn has_health(stream: &str, _: &str) -> bool {
    !guest::named(stream, names::GPU_HEALTH).is_empty()
}

fn guest_brings_gpus_up_and_containers_compute(machine: &Machine) -> Result<Completion> {
    let guest = guest::boot(
        machine,
        "testagent.containers=first:0@root;all:all@root;absent:99",
        has_health,
    )?;
    machine.record("boot.ndjson", guest.stream.as_bytes())?;
    machine.record("console.log", guest.console.as_bytes())?;
    machine.record("guest-nvidia.yaml", guest.spec.as_bytes())?;
    computes(&guest.output("first")?, &machine.gpus[..1])?;
    computes(&guest.output("all")?, &machine.gpus)?;
    // Negative control.
    ensure!(
        guest
            .failed("absent")
            .is_some_and(|error| error.contains("nvidia.com/gpu=99")),
        "GPU 99 is no error: {}",
        guest.console
    );

    let named = |name: &str| guest::named(&guest.stream, name);
    for name in [names::GPU_BOUND, names::GPU_USABLE, names::GPU_PUBLISHED] {
        let of: BTreeSet<PciAddress> = named(name).iter().filter_map(|r| r.gpu).collect();
        ensure!(
            of.iter().eq(&machine.gpus),
            "{name} is of {of:?}, the GPUs are {:?}",
            machine.gpus
        );
    }
    ensure!(
        named(names::GPU_FAILED).is_empty(),
        "a GPU failed: {:?}",
        named(names::GPU_FAILED)
    );
    Ok(Completion::Completed)
}

/// With KATA_AGENT=FILE: the agent of a Kata release, which makes a container by the requests of
/// Kata's runtime.
fn container_of_kata_agent_computes(machine: &Machine) -> Result<Completion> {
    let Some(agent) = std::env::var_os("KATA_AGENT").map(PathBuf::from) else {
        return Ok(Completion::ignored_with(
            "without KATA_AGENT=FILE, a kata-agent of musl",
        ));
    };
    const SANDBOX: &str = "real-gpu";
    let (output, guest) = guest::with(
        machine,
        &agent,
        "agent.server_addr=unix:///run/agent.sock",
        |guest| {
            guest.wait(has_health)?;
            let end = Instant::now() + PATIENCE;
            let stream = loop {
                match UnixStream::connect(guest.root.join("run/agent.sock")) {
                    Ok(stream) => break stream,
                    Err(error) if Instant::now() > end => {
                        bail!("connect to the agent: {error}: {}", guest.console())
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(20)),
                }
            };
            let client = Client::over(stream)?;
            let call = |method: &str, message| {
                client
                    .call(AGENT, method, message, PATIENCE)
                    .with_context(|| guest.console())
            };
            call("CreateSandbox", requests::create_sandbox(SANDBOX))?;
            let container = Container {
                id: "cuda".into(),
                root: "/containers/root".into(),
                arguments: vec![container_run::PROGRAM.into()],
                gpus: vec!["0".into()],
                sandbox: false,
                files: 1024,
            };
            call(
                "CreateContainer",
                requests::create_container(&container, SANDBOX),
            )?;
            call("StartContainer", requests::start_container(&container.id))?;
            let mut output = String::new();
            while said(&output, "ms").is_empty() && said(&output, "error").is_empty() {
                let answer = call("ReadStdout", requests::read_stdout(&container.id, 4096))?;
                output.push_str(&String::from_utf8_lossy(bytes_of(&answer, 1)?));
            }
            Ok((
                output,
                guest.wait(|stream, _| !guest::named(stream, names::AGENT_HOOK).is_empty())?,
            ))
        },
    )?;
    machine.record("kata-agent.ndjson", guest.stream.as_bytes())?;
    machine.record("kata-agent.log", guest.console.as_bytes())?;
    machine.record("kata-agent.txt", output.as_bytes())?;
    computes(&output, &machine.gpus[..1])?;
    Ok(Completion::Completed)
}

/// Longest wait for an answer of the agent.
const PATIENCE: Duration = Duration::from_secs(180);

/// Part of the test agent's last line about what is held.
const HELD_BY_WORKER: &str = r#""process":"gpuinit-worker""#;

fn is_held_while_a_killed_worker_is_replaced(machine: &Machine) -> Result<Completion> {
    // The container computes meanwhile.
    let script = "testagent.guest=script testagent.script=settled>kill;process.died>held";
    let guest = guest::boot(
        machine,
        &format!("testagent.containers=first:0@root {script}"),
        |stream, console| {
            // The second worker has settled as well.
            guest::named(stream, names::SETTLED).len() == 2 && console.contains(HELD_BY_WORKER)
        },
    )?;
    machine.record("killed-worker.ndjson", guest.stream.as_bytes())?;
    computes(&guest.output("first")?, &machine.gpus[..1])?;
    let of = |name: &str| guest::named(&guest.stream, name);
    ensure!(
        of(names::PROCESS_DIED)
            .iter()
            .any(|r| r.fields["status"] == "killed by SIGKILL"),
        "{:?}",
        of(names::PROCESS_DIED)
    );
    ensure!(
        of(names::GPU_FAILED).is_empty(),
        "a GPU failed: {:?}",
        of(names::GPU_FAILED)
    );
    let held = guest
        .lines("held")
        .find(|line| line.get("process") == "gpuinit-keeper")
        .context("no report of what is held")?;
    let wanted = machine.gpus.len();
    let nodes: BTreeSet<&str> = held
        .get("nodes")
        .split(' ')
        .filter(|node| *node != "/dev/nvidiactl")
        .collect();
    ensure!(
        nodes.len() == wanted,
        "the keeper holds {nodes:?}, not {wanted} GPUs"
    );
    Ok(Completion::Completed)
}

fn fault_of_a_program_is_an_xid_and_costs_no_gpu(machine: &Machine) -> Result<Completion> {
    // CUDA's error in the program, and the driver's number for it.
    const ERROR: &str = "700 CUDA_ERROR_ILLEGAL_ADDRESS";
    const MMU_FAULT: u64 = 31;
    let guest = guest::boot(
        machine,
        "testagent.containers=faulty:0@faulty",
        |stream, _| !guest::named(stream, names::GPU_XID).is_empty(),
    )?;
    machine.record("xid.ndjson", guest.stream.as_bytes())?;
    let output = guest.output("faulty")?;
    ensure!(
        said(&output, "error")
            .iter()
            .any(|error| error.contains(ERROR)),
        "the program has not failed: {output}"
    );
    let of = |name: &str| guest::named(&guest.stream, name);
    let xids = of(names::GPU_XID);
    ensure!(
        xids.iter()
            .any(|r| r.gpu == Some(machine.gpus[0]) && r.fields["xid"] == MMU_FAULT),
        "{xids:?}"
    );
    ensure!(
        of(names::GPU_FAILED).is_empty(),
        "a program's fault has cost a GPU: {:?}",
        of(names::GPU_FAILED)
    );
    // The GPU still computes.
    let next = guest::boot(machine, "testagent.containers=next:0@root", has_health)?;
    computes(&next.output("next")?, &machine.gpus[..1])?;
    Ok(Completion::Completed)
}

fn container_of_runc_computes_with_our_spec(machine: &Machine) -> Result<Completion> {
    let Some(runc) = machine::program("runc").or_else(|| machine::program("crun")) else {
        return Ok(Completion::ignored_with("without runc or crun"));
    };
    let specs = kata_gpu_test_support::temp_dir();
    // With the driver's files where the machine's loader has them, and where packages have them: in
    // a folder of its own a container finds libcuda by the cache that the hook makes.
    for (name, driver_root) in [
        ("machine", Path::new("/")),
        ("driver-root", &machine.driver_root),
    ] {
        let spec = machine.our_spec(driver_root)?;
        machine.record(&format!("cdi-generate-{name}.json"), spec.as_bytes())?;
        std::fs::write(specs.path().join("nvidia.json"), &spec)?;
        let output = runc::run(machine, &runc, specs.path(), &["nvidia.com/gpu=all"])?;
        machine.record(&format!("container-{name}.txt"), output.as_bytes())?;
        computes(&output, &machine.gpus)
            .with_context(|| format!("driver root {}", driver_root.display()))?;
    }
    // Negative control.
    let bare = runc::run(machine, &runc, specs.path(), &[])?;
    ensure!(
        said(&bare, "error")
            .iter()
            .any(|error| error.contains("libcuda.so.1")),
        "a container without devices has libcuda: {bare}"
    );
    Ok(Completion::Completed)
}

fn spec_has_what_nvidia_ctk_lists(machine: &Machine) -> Result<Completion> {
    let Some(ctk) = machine::program("nvidia-ctk") else {
        return Ok(Completion::ignored_with("without nvidia-ctk"));
    };
    let text =
        run(machine::command(ctk).args(["cdi", "generate", "--mode", "nvml", "--format", "json"]))?;
    machine.record("nvidia-ctk.json", text.as_bytes())?;
    let theirs: Value = serde_json::from_str(&text)?;
    let ours: Value = serde_json::from_str(&machine.our_spec(&machine.driver_root)?)?;
    let count = theirs["devices"].as_array().map_or(0, Vec::len);
    ensure!(
        count > machine.gpus.len(),
        "nvidia-ctk lists {count} devices"
    );
    for device in (0..machine.gpus.len())
        .map(|k| k.to_string())
        .chain(["all".to_string()])
    {
        same_as_nvidia_ctk(&ours, &theirs, &device, &machine.driver_root)?;
    }
    Ok(Completion::Completed)
}

fn helper_reports_what_nvidia_smi_reports(machine: &Machine) -> Result<Completion> {
    let answer = machine.ask_helper("facts")?;
    machine.record("nvml-facts.json", answer.as_bytes())?;
    let Answer::Facts(facts) = serde_json::from_str(answer.trim())? else {
        bail!("no facts: {answer}")
    };
    let smi = machine::program("nvidia-smi").context("no nvidia-smi in PATH")?;
    let text = run(machine::command(smi).args([
        &format!("--query-gpu={SMI_QUERY}"),
        "--format=csv,noheader,nounits",
    ]))?;
    machine.record("nvidia-smi.csv", text.as_bytes())?;
    let ours = smi_lines(&facts);
    ensure!(
        !ours.is_empty() && ours == text.lines().collect::<Vec<_>>(),
        "ours: {ours:#?}\nnvidia-smi: {text}"
    );
    ensure!(
        facts.devices.iter().all(|gpu| gpu.errors.is_empty()),
        "{answer}"
    );
    Ok(Completion::Completed)
}

/// Files below /proc that the init reads, for [`Machine::record`].
const PROC: [&str; 4] = [
    "/proc/driver/nvidia/version",
    "/proc/driver/nvidia/params",
    "/proc/devices",
    "/proc/driver/nvidia-caps/mig-minors",
];

fn files_of_the_driver_are_read(machine: &Machine) -> Result<Completion> {
    use kata_gpu_init::gpu::driver_proc::{information, majors};
    for path in PROC.map(PathBuf::from) {
        if let Ok(text) = std::fs::read(&path) {
            machine.record(
                &path
                    .to_string_lossy()
                    .trim_start_matches('/')
                    .replace('/', "-"),
                &text,
            )?;
        }
    }
    let majors = majors(Path::new("/proc"))?;
    ensure!(
        majors.nvidia == Some(195) && majors.uvm.is_some(),
        "{majors:?}"
    );
    for gpu in &machine.gpus {
        let text = std::fs::read(format!("/proc/driver/nvidia/gpus/{gpu}/information"))?;
        machine.record(
            &format!("information-{}", gpu.to_string().replace(':', "-")),
            &text,
        )?;
        let read = information(Path::new("/proc"), *gpu)?;
        ensure!(
            read.uuid.is_some() && read.model.is_some(),
            "{gpu}: {read:?}"
        );
    }
    Ok(Completion::Completed)
}
