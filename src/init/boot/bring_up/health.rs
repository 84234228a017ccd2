//! Questions to NVML, once all GPUs are settled: settings of the command line, facts of each GPU,
//! and whether NVML counts the same GPUs as PCI and the driver's /proc. A failure of the helper is
//! a warning.

use super::publication::Update;
use super::schedule_messages::GpuId;
use super::shared::Shared;
use crate::config::Config;
use crate::config::Naming;
use crate::gpu::driver_proc::information;
use crate::machine::{confidential, threads};
use crate::nvml;
use crate::nvml::{Failure, instance_uuids};
use crate::{driver_files, step};
use kata_gpu_wire::fabric::Fabric;
use kata_gpu_wire::names;
use kata_gpu_wire::nvml_messages::{Answer, Clock, Device, Facts, LIST, Request};
use kata_gpu_wire::pci_address::PciAddress;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A usable GPU, as the init knows it when it asks.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    gpu: GpuId,
    minor: u32,
    /// UUID; `None` until the driver knows it.
    uuid: Option<String>,
}

/// Longest wait for the driver's /proc: the file of a GPU that is lost may never be read. A UUID is
/// then not compared.
const PROC_WAIT: Duration = Duration::from_secs(5);

/// Reason why NVML has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoAnswer {
    /// No GPU is usable: nothing is asked.
    NoGpus,
    /// The image has no helper.
    NoHelper,
    /// The helper hangs, and is left alone: another one would hang, too, until a GPU lets go of the
    /// driver's lock.
    Hangs,
    /// The helper has failed.
    Failed,
}

impl NoAnswer {
    fn of(failure: &Failure) -> Self {
        if matches!(failure, Failure::Late(_) | Failure::Hang) {
            Self::Hangs
        } else {
            Self::Failed
        }
    }
}

/// Handling of the command line's settings before a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settings {
    Apply,
    Leave,
}

/// Program of the helper.
fn helper() -> Option<PathBuf> {
    nvml::find(driver_files::driver_root()).or_else(|| nvml::find(Path::new("/")))
}

/// Applies the settings, and reports the facts. `awaited`: GPUs are held back until the answer.
pub async fn ask(
    shared: &Arc<Shared>,
    settings: Settings,
    awaited: bool,
) -> Result<Box<Facts>, NoAnswer> {
    let gpus = usable(shared);
    if gpus.is_empty() {
        report_none(shared.roster.present().len());
        return Err(NoAnswer::NoGpus);
    }
    let mut requests = match settings {
        Settings::Apply => requests(&shared.config, &gpus),
        Settings::Leave => Vec::new(),
    };
    let Some(program) = helper() else {
        report_missing(!requests.is_empty(), awaited);
        return Err(NoAnswer::NoHelper);
    };
    let addresses = gpus.iter().map(|known| known.gpu.address).collect();
    let without_uuids = gpus.clone();
    // Until 590.44.01 a look at `information` waits for locks of the driver.
    let reading = threads::run(move || gpus.into_iter().map(Known::with_uuid).collect());
    let known = match tokio::time::timeout(PROC_WAIT, reading).await {
        Ok(Ok(known)) => known,
        Ok(Err(_)) | Err(_) => without_uuids,
    };
    let step = step!(
        names::NVML,
        devices = tracing::field::Empty,
        driver = tracing::field::Empty,
        nvml = tracing::field::Empty
    );
    requests.push(Request::Facts(addresses));
    let mut facts = Err(NoAnswer::Failed);
    for (request, answer) in shared.nvml.ask(program, requests).await {
        match (request, answer) {
            (_, Ok(Answer::Facts(found))) => facts = Ok(found),
            (Request::Facts(_), Ok(Answer::Error(error))) => step.fail(&refused(&error)),
            (request, Ok(Answer::Error(error))) => report_setting(&request, Some(error)),
            (request, Ok(Answer::Done)) => report_setting(&request, None),
            (_, Err(failure)) => {
                step.fail(&failure);
                facts = Err(NoAnswer::of(&failure));
            }
        }
    }
    let facts = facts?;
    step.note("devices", facts.devices.len() as u64);
    step.note("driver", facts.driver.as_deref());
    step.note("nvml", facts.nvml.as_deref());
    drop(step);
    name_instances(shared, &known, &facts);
    report(&known, shared.roster.present().len(), &facts);
    Ok(facts)
}

/// The error of a request that NVML has refused.
fn refused(error: &str) -> String {
    format!("NVML: {error}")
}

/// Asks only for the state, after setting the ready state if `set_ready`; returns whether that
/// succeeded.
pub async fn ask_state(
    shared: &Shared,
    set_ready: bool,
) -> (Result<Box<Facts>, NoAnswer>, Result<bool, String>) {
    let known = usable(shared);
    let addresses: Vec<PciAddress> = known.iter().map(|known| known.gpu.address).collect();
    let mut set = Ok(false);
    if addresses.is_empty() {
        return (Err(NoAnswer::NoGpus), set);
    }
    let Some(program) = helper() else {
        return (Err(NoAnswer::NoHelper), set);
    };
    let requests = set_ready
        .then_some(Request::Ready(true))
        .into_iter()
        .chain([Request::State(addresses)])
        .collect();
    let mut facts = Err(NoAnswer::Failed);
    for (request, answer) in shared.nvml.ask(program, requests).await {
        match (request, answer) {
            (_, Ok(Answer::Facts(found))) => facts = Ok(found),
            (_, Ok(Answer::Done)) => set = Ok(true),
            (Request::Ready(_), Ok(Answer::Error(error))) => set = Err(refused(&error)),
            (request, Err(failure)) => {
                if matches!(request, Request::Ready(_)) {
                    set = Err(failure.to_string());
                }
                facts = Err(NoAnswer::of(&failure));
            }
            (_, Ok(Answer::Error(_))) => {}
        }
    }
    (facts, set)
}

/// Adds the names of MIG instances by UUID, where configured; only NVML knows them. The writer
/// drops those of a GPU that has left.
fn name_instances(shared: &Shared, known: &[Known], facts: &Facts) {
    if !shared.config.cdi_names.contains(&Naming::Uuid) {
        return;
    }
    for Known { gpu, minor, .. } in known {
        if let Some(device) = listed(facts, gpu.address) {
            let (uuids, _) = instance_uuids(*minor, &device.mig);
            // Sending fails only when the writer is gone, with the runtime.
            let _unused = shared
                .spec
                .send(Update::KnownInstances { gpu: *gpu, uuids });
        }
    }
}

/// NVML's facts of the GPU at an address.
fn listed(facts: &Facts, address: PciAddress) -> Option<&Device> {
    let mut devices = facts.devices.iter();
    devices.find(|device| device.address == Some(address))
}

/// GPUs that are usable now, without their UUIDs.
fn usable(shared: &Shared) -> Vec<Known> {
    let known = |gpu: GpuId| {
        Some(Known {
            gpu,
            minor: shared.seen.minor(gpu)?,
            uuid: None,
        })
    };
    shared.usable().into_iter().filter_map(known).collect()
}

impl Known {
    fn with_uuid(self) -> Self {
        let found = information(Path::new("/proc"), self.gpu.address).ok();
        Self {
            uuid: found.and_then(|found| found.uuid),
            ..self
        }
    }
}

/// Requests that the command line's settings become.
fn requests(config: &Config, gpus: &[Known]) -> Vec<Request> {
    let clocks = [
        (Clock::Graphics, config.graphics_mhz),
        (Clock::Memory, config.memory_mhz),
    ];
    let of = |gpu: PciAddress| {
        let clocks = clocks.into_iter().filter_map(move |(clock, range)| {
            range.map(|r| Request::Clocks {
                gpu,
                clock,
                min: r.min,
                max: r.max,
            })
        });
        clocks.chain(config.power_w.map(|w| Request::Power {
            gpu,
            milliwatts: w.saturating_mul(1000),
        }))
    };
    gpus.iter()
        .flat_map(|known| of(known.gpu.address))
        .collect()
}

/// A guest whose GPUs have all failed. NVML opens every GPU that it is asked about, which starts a
/// failed initialisation again.
fn report_none(gpus: usize) {
    if gpus > 0 {
        tracing::info!(name: names::NVML, reason = none_usable(gpus));
    }
}

fn none_usable(gpus: usize) -> String {
    format!(
        "none of {gpus} GPU(s) is usable, by their own events: NVML is not asked, which would \
            initialise them again"
    )
}

fn report_missing(settings: bool, awaited: bool) {
    let missing = Failure::Missing.to_string();
    let lacks = [
        (settings, "clocks and power limits stay as they are"),
        (awaited, "it is unknown whether CUDA works on the GPUs"),
    ];
    let lacks: Vec<&str> = lacks
        .iter()
        .filter(|(lacks, _)| *lacks)
        .map(|(_, what)| *what)
        .collect();
    if lacks.is_empty() {
        tracing::debug!(name: names::NVML, reason = missing);
    } else {
        tracing::error!(name: names::NVML, error = %format!("{}: {missing}", lacks.join(", ")));
    }
}

fn report_setting(request: &Request, error: Option<String>) {
    let (gpu, what, min, max) = match *request {
        Request::Clocks {
            gpu,
            clock,
            min,
            max,
        } => (gpu, format!("{clock} clock, MHz"), min, max),
        Request::Power { gpu, milliwatts } => {
            (gpu, "power limit, mW".to_string(), milliwatts, milliwatts)
        }
        Request::Facts(_) | Request::State(_) | Request::Ready(_) => return,
    };
    match error {
        None => {
            tracing::info!(
                name: names::GPU_SETTING, gpu = %gpu, what, min = u64::from(min),
                max = u64::from(max),
            )
        }
        Some(error) => {
            let error = format!("{what}, {min} to {max}: {error}: the driver's value stays");
            tracing::error!(
                name: names::GPU_SETTING, gpu = %gpu, what, min = u64::from(min),
                max = u64::from(max), error,
            );
        }
    }
}

fn report(known: &[Known], present: usize, facts: &Facts) {
    if let Some(error) = &facts.confidential_error
        && confidential::is_confidential()
    {
        let error = format!(
            "ask for the confidential state: {error}: it is unknown whether CUDA works on the GPUs"
        );
        tracing::error!(name: names::CONFIDENTIAL, error);
    }
    for (gpu, error) in mixed(known, facts, confidential::is_confidential()) {
        tracing::error!(name: names::CONFIDENTIAL, gpu = %gpu, error);
    }
    let generation = |gpu: Option<PciAddress>| {
        let known = known.iter().find(|known| Some(known.gpu.address) == gpu)?;
        known.gpu.again()
    };
    for device in &facts.devices {
        report_device(device, generation(device.address));
    }
    for (gpu, error) in differences(known, present, facts) {
        let generation = generation(gpu);
        tracing::error!(
            name: names::GPU_HEALTH, gpu = gpu.map(tracing::field::display), generation, error,
        );
    }
}

/// GPUs that are not as confidential as the guest and the other GPUs, in sentences for people.
fn mixed(known: &[Known], facts: &Facts, guest: bool) -> Vec<(PciAddress, String)> {
    if facts.confidential_error.is_some() {
        return Vec::new();
    }
    let state = facts.confidential.as_ref();
    let enabled = state.is_some_and(|state| state.enabled);
    let of = |gpu: &Known| {
        let address = gpu.gpu.address;
        let device = listed(facts, address);
        // Memory is not protected GPU by GPU under protected PCIe.
        let each = state.is_some_and(|state| !state.protected_pcie);
        let unprotected = each && device.is_some_and(|device| device.protected == Some(false));
        let what = match (guest, enabled) {
            (true, false) => {
                "the guest is confidential, and GPU {} is not: the host reads what containers \
                    send to it"
            }
            (true, true) if unprotected => {
                "GPU {} is not confidential, unlike the guest: the host reads what containers \
                    send to it"
            }
            (false, true) if !state.is_some_and(|state| state.devtools) => {
                "GPU {} is confidential, and the guest is not: the host reads the guest's memory"
            }
            _ => return None,
        };
        let cure = "set the same mode for the guest and all its GPUs on the host";
        Some((
            address,
            format!("{}; {cure}", what.replace("{}", &address.to_string())),
        ))
    };
    known.iter().filter_map(of).collect()
}

fn report_device(device: &Device, generation: Option<u64>) {
    let joined = |list: Vec<String>| (!list.is_empty()).then(|| list.join(LIST));
    let (fabric, remapped) = (device.fabric.as_ref(), device.remapped.as_ref());
    tracing::info!(
        name: names::GPU_HEALTH,
        gpu = device.address.map(tracing::field::display),
        generation,
        uuid = device.uuid.as_deref(),
        model = device.name.as_deref(),
        mig = joined(device.mig.iter().map(ToString::to_string).collect()),
        persistence = device.persistence,
        graphics_mhz = device.graphics_mhz.map(u64::from),
        memory_mhz = device.memory_mhz.map(u64::from),
        power_mw = device.power_mw.map(u64::from),
        power_limit_mw = device.power_limit_mw.map(u64::from),
        ecc = device.ecc,
        ecc_uncorrected = device.ecc_uncorrected,
        rows_remapped =
                remapped.map(|rows| u64::from(rows.correctable) + u64::from(rows.uncorrectable)),
        remap_pending = remapped.map(|rows| rows.pending),
        remap_failed = remapped.map(|rows| rows.failed),
        throttle = joined(device.throttle.clone()),
        fabric = fabric.map(|fabric| tracing::field::display(fabric.state)),
        fabric_status = fabric.map(|fabric| u64::from(fabric.status)),
        fabric_health = fabric.and_then(|fabric| fabric.health).map(u64::from),
        clique = fabric.map(|fabric| u64::from(fabric.clique)),
        cluster = fabric.map(|fabric| fabric.cluster.as_str()),
        nvlinks = device.nvlinks.map(u64::from),
        nvlinks_active = device.nvlinks_active.map(u64::from),
    );
    for error in problems(device) {
        tracing::error!(
            name: names::GPU_HEALTH, gpu = device.address.map(tracing::field::display),
            generation, error,
        );
    }
}

/// Problems of a GPU, in sentences for people.
fn problems(device: &Device) -> Vec<String> {
    let mut found = device.errors.clone();
    found.extend(
        device
            .minor
            .into_iter()
            .flat_map(|minor| instance_uuids(minor, &device.mig).1),
    );
    found.extend(device.fabric.as_ref().and_then(Fabric::effect));
    if device.remapped.as_ref().is_some_and(|rows| rows.failed) {
        found.push("a row of memory could not be remapped: have this GPU replaced".into());
    }
    found
}

/// Differences between NVML's answer, the `present` GPUs of PCI, and the driver's /proc.
fn differences(
    known: &[Known],
    present: usize,
    facts: &Facts,
) -> Vec<(Option<PciAddress>, String)> {
    let mut found = Vec::new();
    for gpu in known {
        let address = gpu.gpu.address;
        let Some(device) = listed(facts, address) else {
            found.push((
                Some(address),
                format!("GPU {address} is usable, and NVML does not list it: CUDA will not see it"),
            ));
            continue;
        };
        if device.minor.is_some_and(|minor| minor != gpu.minor) {
            let minor = device.minor.unwrap_or_default();
            let error = format!(
                "GPU {address} has minor {} in /proc and {minor} by NVML: containers may get \
                    another GPU",
                gpu.minor
            );
            found.push((Some(address), error));
        }
        if let (Some(ours), Some(theirs)) = (&gpu.uuid, &device.uuid)
            && ours != theirs
        {
            found.push((
                Some(address),
                format!("GPU {address} has UUID {ours} in /proc and {theirs} by NVML"),
            ));
        }
    }
    if let Some(count) = facts.count.filter(|count| *count as usize > present) {
        found.push((
            None,
            format!("NVML counts {count} GPUs, and the PCI bus has {present}"),
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::bring_up::previous::Previous;
    use crate::config::Range;
    use crate::gpu::driver_caps::MigInstance;
    use crate::stream::layer::tests::records;
    use kata_gpu_wire::nvml_messages::{Confidential, MigDevice};
    use std::collections::BTreeMap;

    fn known(bus: u8, minor: u32) -> Known {
        Known {
            gpu: GpuId {
                address: format!("0000:{bus:02x}:00.0").parse().unwrap(),
                generation: 0,
            },
            minor,
            uuid: Some(format!("GPU-{bus}")),
        }
    }

    fn device(gpu: &Known) -> Device {
        Device {
            address: Some(gpu.gpu.address),
            minor: Some(gpu.minor),
            uuid: gpu.uuid.clone(),
            ..Device::default()
        }
    }

    #[test]
    fn gpus_that_nvml_lists_differently_are_named() {
        let gpus = [known(1, 0), known(2, 1), known(3, 2), known(4, 3)];
        let agreed = Facts {
            count: Some(4),
            devices: gpus.iter().map(device).collect(),
            ..Facts::default()
        };
        assert_eq!(differences(&gpus, 4, &agreed), []);
        // A GPU that has failed is counted as well.
        assert_eq!(differences(&gpus, 5, &agreed), []);
        let mut facts = agreed.clone();
        facts.devices[0].minor = Some(7);
        facts.devices[1].uuid = Some("GPU-x".into());
        facts.devices.remove(2);
        // A driver that reports neither is no difference.
        (facts.devices[2].minor, facts.devices[2].uuid, facts.count) = (None, None, Some(5));
        let found = differences(&gpus, 4, &facts);
        let texts: Vec<&str> = found.iter().map(|(_, text)| text.as_str()).collect();
        assert_eq!(
            texts,
            [
                "GPU 0000:01:00.0 has minor 0 in /proc and 7 by NVML: containers may get another \
                    GPU",
                "GPU 0000:02:00.0 has UUID GPU-2 in /proc and GPU-x by NVML",
                "GPU 0000:03:00.0 is usable, and NVML does not list it: CUDA will not see it",
                "NVML counts 5 GPUs, and the PCI bus has 4",
            ]
        );
    }

    #[test]
    fn the_health_of_a_gpu_that_came_again_is_that_arrivals_alone() {
        let mut gpu = known(1, 3);
        gpu.gpu.generation = 1;
        let uuid = "MIG-01234567-89ab-cdef-0123-456789abcdef".to_string();
        let mut listed = device(&gpu);
        listed.errors.push("power: unknown".into());
        listed.mig.push(MigDevice {
            uuid: uuid.clone(),
            gpu_instance: 1,
            compute_instance: 0,
        });
        listed.uuid = Some("GPU-x".into());
        let facts = Facts {
            devices: vec![listed],
            ..Facts::default()
        };
        let found = |generation: u32| {
            let (address, minor) = (gpu.gpu.address, 3_u64);
            tracing::info!(name: names::GPU_FOUND, gpu = %address, generation);
            tracing::info!(name: names::GPU_BOUND, gpu = %address, minor, generation);
        };
        let known_of = |generation| {
            let all = records(|| {
                found(generation);
                report(&[gpu.clone()], 1, &facts);
            });
            let health = all.iter().filter(|r| r.name == names::GPU_HEALTH);
            let generations: Vec<_> = health.map(|r| r.fields["generation"].as_u64()).collect();
            // Facts, what is wrong with it, and what differs.
            assert_eq!(generations, [Some(1); 3]);
            let gpu = GpuId {
                generation,
                ..gpu.gpu
            };
            Previous::from_records(&all).gpu(gpu).instance_uuids
        };
        let instance = MigInstance {
            gpu: 3,
            gi: 1,
            ci: 0,
        };
        assert_eq!(known_of(1), BTreeMap::from([(instance, uuid)]));
        assert_eq!(known_of(2), BTreeMap::new());
    }

    #[test]
    fn a_gpu_that_is_not_as_confidential_as_its_guest_is_named() {
        let gpus = [known(1, 0), known(2, 1)];
        let facts = |enabled: bool, devtools| Facts {
            confidential: enabled.then(|| Confidential {
                enabled,
                devtools,
                ..Confidential::default()
            }),
            devices: gpus.iter().map(device).collect(),
            ..Facts::default()
        };
        assert_eq!(mixed(&gpus, &facts(false, false), false), []);
        assert_eq!(mixed(&gpus, &facts(true, false), true), []);
        assert_eq!(
            mixed(&gpus, &facts(true, true), false),
            [],
            "for development"
        );
        let text = |found: Vec<(PciAddress, String)>| {
            found.into_iter().map(|(_, text)| text).collect::<Vec<_>>()
        };
        let plain = text(mixed(&gpus, &facts(false, false), true));
        assert!(
            plain.len() == 2
                && plain[0].starts_with("the guest is confidential, and GPU 0000:01:00.0 is not:"),
            "{plain:?}"
        );
        assert_eq!(mixed(&gpus, &facts(true, false), false).len(), 2);
        let mut one = facts(true, false);
        (one.devices[0].protected, one.devices[1].protected) = (Some(true), Some(false));
        let one = text(mixed(&gpus, &one, true));
        assert!(
            one.len() == 1
                && one[0].starts_with("GPU 0000:02:00.0 is not confidential, unlike the guest:"),
            "{one:?}"
        );
    }

    #[test]
    fn what_is_wrong_with_a_gpu_is_a_sentence_each() {
        let mut gpu = device(&known(1, 0));
        assert_eq!(problems(&gpu), Vec::<String>::new());
        gpu.errors.push("power: unknown".into());
        gpu.remapped = Some(kata_gpu_wire::nvml_messages::Remapped {
            failed: true,
            ..Default::default()
        });
        gpu.fabric = Some(Fabric {
            state: kata_gpu_wire::fabric::FabricState::Completed,
            status: 999,
            ..Default::default()
        });
        assert_eq!(
            problems(&gpu),
            [
                "power: unknown",
                "NVLink is not usable between GPUs: the fabric is complete with NVML's error 999; \
                    collectives go over PCIe",
                "a row of memory could not be remapped: have this GPU replaced",
            ]
        );
    }

    #[test]
    fn an_instance_is_named_by_uuid_and_no_name_breaks_the_spec() {
        let uuid = |n: u32| format!("MIG-{n:08x}-0000-0000-0000-000000000000");
        let mig = |uuid: String, gpu_instance, compute_instance| MigDevice {
            uuid,
            gpu_instance,
            compute_instance,
        };
        let one = |gi, ci| MigInstance { gpu: 3, gi, ci };
        let listed = vec![
            mig(uuid(2), 2, 0),
            mig(uuid(1), 1, 0),
            mig(uuid(1), 1, 1),
            mig("MIG-GPU-1/7/0".into(), 7, 0),
            mig(uuid(4), 2, 0),
        ];
        let device = Device {
            mig: listed,
            minor: Some(3),
            ..device(&known(1, 3))
        };
        let (uuids, wrong) = instance_uuids(3, &device.mig);
        assert_eq!(
            uuids,
            BTreeMap::from([(one(1, 0), uuid(1)), (one(2, 0), uuid(2))])
        );
        let places: Vec<&str> = wrong
            .iter()
            .filter_map(|text| text.split(' ').nth(2))
            .collect();
        assert_eq!(places, ["1/1", "7/0", "2/0"]);
        assert_eq!(problems(&device), wrong);
    }

    #[test]
    fn each_gpu_gets_each_setting_of_the_command_line() {
        let gpus = [known(1, 0), known(2, 1)];
        assert_eq!(requests(&Config::default(), &gpus), []);
        let range = Some(Range {
            min: 210,
            max: 1980,
        });
        let config = Config {
            graphics_mhz: range,
            power_w: Some(500),
            ..Config::default()
        };
        let lines: Vec<String> = requests(&config, &gpus)
            .iter()
            .map(ToString::to_string)
            .collect();
        assert_eq!(
            lines,
            [
                "clocks 0000:01:00.0 graphics 210 1980",
                "power 0000:01:00.0 500000",
                "clocks 0000:02:00.0 graphics 210 1980",
                "power 0000:02:00.0 500000"
            ]
        );
    }
}
