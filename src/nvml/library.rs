//! NVML's side of the helper: questions to `libnvidia-ml.so.1`. Only `kata-gpu-nvml` has it.
#![allow(unsafe_code, reason = "functions of NVML that nvml-wrapper lacks")]

use kata_gpu_wire::fabric::{Fabric, FabricState};
use kata_gpu_wire::nvml_messages::{
    Answer, Clock, Confidential, Device, Environment, Facts, MigDevice, Remapped, Request,
};
use kata_gpu_wire::pci_address::PciAddress;
use nvml_wrapper::bitmasks::InitFlags;
use nvml_wrapper::enum_wrappers::device::{self as kinds, EccCounter, MemoryError};
use nvml_wrapper::enums::device::GpuLockedClocksSetting;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::{Device as Handle, Nvml};
use nvml_wrapper_sys::bindings::{
    NVML_CC_SYSTEM_DEVTOOLS_MODE_ON, NVML_CC_SYSTEM_FEATURE_ENABLED, NVML_CC_SYSTEM_MULTIGPU_NONE,
    NVML_CC_SYSTEM_MULTIGPU_PROTECTED_PCIE, nvmlConfComputeMemSizeInfo_t,
    nvmlConfComputeSystemState_t, nvmlDevice_t, nvmlGpuFabricInfo_v2_t, nvmlReturn_t,
    nvmlSystemConfComputeSettings_v1_t,
};
use std::ffi::{OsStr, c_uint};
use std::fmt::Write;

/// Links that a GPU may have.
const MAX_NVLINKS: u32 = 18;
/// Version 2 of the fabric's structure: its size, with the version in the upper byte.
const FABRIC_INFO_V2: u32 = size_of::<nvmlGpuFabricInfo_v2_t>() as u32 | 2 << 24;

/// Loads the library and starts NVML.
pub fn load(library: &OsStr) -> Result<Nvml, String> {
    // A guest whose GPUs have all failed has facts, too: none.
    Nvml::builder()
        .lib_path(library)
        .flags(InitFlags::NO_GPUS)
        .init()
        .map_err(|e| format!("load {}: {e}", std::path::Path::new(library).display()))
}

/// Answers one request.
pub fn answer(nvml: &Nvml, request: &Request) -> Answer {
    let done = |result: Result<(), NvmlError>| {
        result.map_or_else(
            |e| Answer::Error(format!("{request}: {e}")),
            |()| Answer::Done,
        )
    };
    let by_address = |gpu: &PciAddress| nvml.device_by_pci_bus_id(gpu.to_string());
    match request {
        Request::Facts(gpus) => facts(nvml, gpus, device),
        Request::State(gpus) => facts(nvml, gpus, state),
        Request::Clocks {
            gpu,
            clock: Clock::Graphics,
            min,
            max,
        } => done(by_address(gpu).and_then(|mut device| {
            device.set_gpu_locked_clocks(GpuLockedClocksSetting::Numeric {
                min_clock_mhz: *min,
                max_clock_mhz: *max,
            })
        })),
        Request::Clocks {
            gpu,
            clock: Clock::Memory,
            min,
            max,
        } => done(by_address(gpu).and_then(|mut device| device.set_mem_locked_clocks(*min, *max))),
        Request::Power { gpu, milliwatts } => done(
            by_address(gpu).and_then(|mut device| device.set_power_management_limit(*milliwatts)),
        ),
        Request::Ready(on) => done(set_ready(nvml, *on)),
    }
}

/// Facts of the system, and of these GPUs, of all where there is none, what `of_device` asks. An
/// error is that of the count alone: no GPU, and no answer, are different things.
fn facts(nvml: &Nvml, gpus: &[PciAddress], of_device: fn(&Nvml, &Handle) -> Device) -> Answer {
    let count = match nvml.device_count() {
        Ok(count) => count,
        Err(error) => return Answer::Error(format!("count GPUs: {error}")),
    };
    let (confidential, confidential_error) = match confidential(nvml) {
        // Without a GPU the library has no answer (550.163.01: an unknown error).
        _ if count == 0 => (None, None),
        Ok(state) => (state, None),
        Err(error) => (None, Some(error.to_string())),
    };
    let found =
        |handle: Result<Handle, NvmlError>, address, what: &dyn std::fmt::Display| match handle {
            Ok(handle) => Some(of_device(nvml, &handle)),
            // A GPU that NVML does not know is not in its list.
            Err(NvmlError::NotFound) => None,
            Err(error) => Some(Device {
                address,
                fabric: Some(Fabric::unknown()),
                errors: vec![format!("GPU {what} of NVML: {error}")],
                ..Device::default()
            }),
        };
    let devices = match gpus {
        [] => (0..count)
            .filter_map(|index| found(nvml.device_by_index(index), None, &index))
            .collect(),
        gpus => gpus
            .iter()
            .filter_map(|gpu| found(nvml.device_by_pci_bus_id(gpu.to_string()), Some(*gpu), gpu))
            .collect(),
    };
    let (driver, nvml) = (nvml.sys_driver_version().ok(), nvml.sys_nvml_version().ok());
    Answer::Facts(Box::new(Facts {
        driver,
        nvml,
        count: Some(count),
        confidential,
        confidential_error,
        devices,
    }))
}

/// Whether driver or GPU do not have what was asked for.
fn is_lacking(error: &NvmlError) -> bool {
    matches!(
        error,
        NvmlError::NotSupported | NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_)
    )
}

/// State of the system; None where the driver has no confidential computing. No GPU is asked: the
/// first one may have failed.
fn confidential(nvml: &Nvml) -> Result<Option<Confidential>, NvmlError> {
    let (feature, environment, devtools, multi_gpu) = match settings(nvml) {
        // Drivers before 550 have the state alone.
        Err(error) if is_lacking(&error) => match state_before_550(nvml) {
            Err(error) if is_lacking(&error) => return Ok(None),
            state => state.map(|state| {
                (
                    state.ccFeature,
                    state.environment,
                    state.devToolsMode,
                    NVML_CC_SYSTEM_MULTIGPU_NONE,
                )
            })?,
        },
        settings => settings.map(|settings| {
            (
                settings.ccFeature,
                settings.environment,
                settings.devToolsMode,
                settings.multiGpuMode,
            )
        })?,
    };
    let protected_pcie = multi_gpu == NVML_CC_SYSTEM_MULTIGPU_PROTECTED_PCIE;
    // The driver reports the feature as off where protected PCIe is on.
    let enabled = feature == NVML_CC_SYSTEM_FEATURE_ENABLED || protected_pcie;
    let ready = enabled && is_ready(nvml)?;
    let (environment, devtools) = (
        Environment::of(environment),
        devtools == NVML_CC_SYSTEM_DEVTOOLS_MODE_ON,
    );
    Ok(Some(Confidential {
        enabled,
        environment,
        devtools,
        protected_pcie,
        ready,
    }))
}

fn settings(nvml: &Nvml) -> Result<nvmlSystemConfComputeSettings_v1_t, NvmlError> {
    let function = nvml_sym(nvml.lib().nvmlSystemGetConfComputeSettings.as_ref())?;
    let version = size_of::<nvmlSystemConfComputeSettings_v1_t>() as u32 | 1 << 24;
    let mut settings = nvmlSystemConfComputeSettings_v1_t {
        version,
        environment: 0,
        ccFeature: 0,
        devToolsMode: 0,
        multiGpuMode: 0,
    };
    // SAFETY: the structure has the size of its version.
    unsafe { nvml_try(function(&mut settings))? };
    Ok(settings)
}

fn state_before_550(nvml: &Nvml) -> Result<nvmlConfComputeSystemState_t, NvmlError> {
    let function = nvml_sym(nvml.lib().nvmlSystemGetConfComputeState.as_ref())?;
    let mut state = nvmlConfComputeSystemState_t {
        environment: 0,
        ccFeature: 0,
        devToolsMode: 0,
    };
    // SAFETY: the structure is the function's.
    unsafe { nvml_try(function(&mut state))? };
    Ok(state)
}

fn is_ready(nvml: &Nvml) -> Result<bool, NvmlError> {
    let function = nvml_sym(nvml.lib().nvmlSystemGetConfComputeGpusReadyState.as_ref())?;
    let mut accepting = 0;
    // SAFETY: the pointer is to an unsigned int of this frame, as the function's signature has it.
    unsafe { nvml_try(function(&mut accepting))? };
    Ok(accepting != 0)
}

fn set_ready(nvml: &Nvml, on: bool) -> Result<(), NvmlError> {
    let function = nvml_sym(nvml.lib().nvmlSystemSetConfComputeGpusReadyState.as_ref())?;
    // SAFETY: the function takes an unsigned int.
    unsafe { nvml_try(function(u32::from(on))) }
}

/// Values of one GPU, and the errors of those that could not be had.
#[derive(Default)]
struct Asked {
    errors: Vec<String>,
}

impl Asked {
    /// Value of a result; `None` where driver or GPU do not have it. Notes an error.
    fn some<T>(&mut self, what: &str, result: Result<T, NvmlError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) if is_lacking(&error) => None,
            Err(error) => {
                self.errors.push(format!("{what}: {error}"));
                None
            }
        }
    }

    /// State of the fabric; `None` where driver or GPU do not report one.
    fn fabric(&mut self, nvml: &Nvml, device: &Handle) -> Option<Fabric> {
        let errors = self.errors.len();
        let found = self.some("fabric", fabric(nvml, device));
        if self.errors.len() > errors {
            Some(Fabric::unknown())
        } else {
            found
        }
    }

    fn address(&mut self, device: &Handle) -> Option<PciAddress> {
        let pci = self.some("PCI address", device.pci_info())?;
        let address = sysfs_address(&pci.bus_id);
        if address.is_none() {
            self.errors
                .push(format!("PCI address: {:?} is none", pci.bus_id));
        }
        address
    }
}

fn state(nvml: &Nvml, device: &Handle) -> Device {
    let mut asked = Asked::default();
    let found = Device {
        address: asked.address(device),
        fabric: asked.fabric(nvml, device),
        ..Device::default()
    };
    Device {
        errors: asked.errors,
        ..found
    }
}

fn device(nvml: &Nvml, device: &Handle) -> Device {
    let mut asked = Asked::default();
    let address = asked.address(device);
    let (nvlinks, nvlinks_active) = nvlinks(device);
    let found = Device {
        address,
        minor: asked.some("minor", device.minor_number()),
        uuid: asked.some("UUID", device.uuid()),
        name: asked.some("name", device.name()),
        mig: mig(nvml, device, &mut asked),
        persistence: asked.some("persistence mode", device.is_in_persistent_mode()),
        graphics_mhz: asked.some("graphics clock", device.clock_info(kinds::Clock::Graphics)),
        memory_mhz: asked.some("memory clock", device.clock_info(kinds::Clock::Memory)),
        power_mw: asked.some("power", device.power_usage()),
        power_limit_mw: asked.some("power limit", device.power_management_limit()),
        ecc: asked
            .some("ECC", device.is_ecc_enabled())
            .map(|mode| mode.currently_enabled),
        ecc_uncorrected: asked.some(
            "ECC errors",
            device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile),
        ),
        remapped: asked.some("remapped rows", remapped(nvml, device)),
        throttle: asked
            .some("clock reasons", device.current_throttle_reasons())
            .map(|reasons| {
                reasons
                    .iter_names()
                    .map(|(name, _)| name.to_lowercase())
                    .collect()
            })
            .unwrap_or_default(),
        protected: asked.some("protected memory", protected(nvml, device)),
        fabric: asked.fabric(nvml, device),
        nvlinks,
        nvlinks_active,
        errors: Vec::new(),
    };
    Device {
        errors: asked.errors,
        ..found
    }
}

/// NVML writes a domain of eight digits and capitals; sysfs at least four and small letters.
fn sysfs_address(text: &str) -> Option<PciAddress> {
    let address: PciAddress = text.to_lowercase().parse().ok()?;
    Some(address)
}

/// MIG instances; none where MIG is off or unknown.
fn mig(nvml: &Nvml, device: &Handle, asked: &mut Asked) -> Vec<MigDevice> {
    let count = asked
        .some("MIG instances", device.mig_device_count())
        .unwrap_or_default();
    let one = |index: u32| -> Result<Option<MigDevice>, NvmlError> {
        let instance = match device.mig_device_by_index(index) {
            // Indices have holes: the count is that of instances that a GPU can have.
            Err(NvmlError::NotFound) => return Ok(None),
            found => found?,
        };
        let functions = (
            &nvml.lib().nvmlDeviceGetGpuInstanceId,
            &nvml.lib().nvmlDeviceGetComputeInstanceId,
        );
        Ok(Some(MigDevice {
            uuid: instance.uuid()?,
            gpu_instance: number(nvml_sym(functions.0.as_ref())?, &instance)?,
            compute_instance: number(nvml_sym(functions.1.as_ref())?, &instance)?,
        }))
    };
    (0..count)
        .filter_map(|index| {
            asked
                .some(&format!("MIG instance {index}"), one(index))
                .flatten()
        })
        .collect()
}

/// Function of NVML that writes the number of an instance.
// SAFETY: a caller passes a handle of NVML's own and a pointer to an unsigned int: `number` does.
type NumberFunction = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint) -> nvmlReturn_t;

/// Number of an instance, as `function` writes it.
fn number(function: &NumberFunction, instance: &Handle) -> Result<u32, NvmlError> {
    let mut number = 0;
    // SAFETY: the handle is NVML's own and lives as long as the library; the pointer is to an
    // unsigned int of this frame, as the signature has it.
    unsafe { nvml_try(function(instance.handle(), &mut number))? };
    Ok(number)
}

/// Number of links, and of those that are active.
fn nvlinks(device: &Handle) -> (Option<u32>, Option<u32>) {
    let links: Vec<bool> = (0..MAX_NVLINKS)
        .map_while(|link| device.link_wrapper_for(link).is_active().ok())
        .collect();
    if links.is_empty() {
        return (None, None);
    }
    (
        Some(links.len() as u32),
        Some(links.iter().filter(|active| **active).count() as u32),
    )
}

/// Whether memory of the GPU is protected by confidential computing.
fn protected(nvml: &Nvml, device: &Handle) -> Result<bool, NvmlError> {
    let function = nvml_sym(nvml.lib().nvmlDeviceGetConfComputeMemSizeInfo.as_ref())?;
    let mut sizes = nvmlConfComputeMemSizeInfo_t {
        protectedMemSizeKib: 0,
        unprotectedMemSizeKib: 0,
    };
    // SAFETY: the handle is NVML's own and lives as long as `nvml`; the structure is the
    // function's.
    unsafe { nvml_try(function(device.handle(), &mut sizes))? };
    Ok(sizes.protectedMemSizeKib > 0)
}

fn remapped(nvml: &Nvml, device: &Handle) -> Result<Remapped, NvmlError> {
    let function = nvml_sym(nvml.lib().nvmlDeviceGetRemappedRows.as_ref())?;
    let (mut correctable, mut uncorrectable, mut pending, mut failed) = (0, 0, 0, 0);
    // SAFETY: the handle is NVML's own and lives as long as `nvml`; each pointer is to an unsigned
    // int of this frame, as the function's signature has it.
    unsafe {
        nvml_try(function(
            device.handle(),
            &mut correctable,
            &mut uncorrectable,
            &mut pending,
            &mut failed,
        ))?
    };
    Ok(Remapped {
        correctable,
        uncorrectable,
        pending: pending != 0,
        failed: failed != 0,
    })
}

fn fabric(nvml: &Nvml, device: &Handle) -> Result<Fabric, NvmlError> {
    match fabric_v2(nvml, device) {
        // Drivers before 550 have the first version alone.
        Err(NvmlError::FailedToLoadSymbol(_) | NvmlError::FunctionNotFound) => {
            fabric_v1(nvml, device)
        }
        result => result,
    }
}

fn fabric_v2(nvml: &Nvml, device: &Handle) -> Result<Fabric, NvmlError> {
    let function = nvml_sym(nvml.lib().nvmlDeviceGetGpuFabricInfoV.as_ref())?;
    // SAFETY: a structure of integers and byte arrays, for which zeros are values.
    let mut info: nvmlGpuFabricInfo_v2_t = unsafe { std::mem::zeroed() };
    info.version = FABRIC_INFO_V2;
    // SAFETY: the handle is NVML's own and lives as long as `nvml`; `info` has the size of its
    // version.
    unsafe { nvml_try(function(device.handle(), &mut info))? };
    Ok(Fabric {
        state: FabricState::of(u32::from(info.state)),
        status: info.status,
        clique: info.cliqueId,
        cluster: cluster(&info.clusterUuid),
        health: Some(info.healthMask),
    })
}

fn fabric_v1(nvml: &Nvml, device: &Handle) -> Result<Fabric, NvmlError> {
    let function = nvml_sym(nvml.lib().nvmlDeviceGetGpuFabricInfo.as_ref())?;
    // SAFETY: a structure of integers and byte arrays, for which zeros are values.
    let mut info: nvml_wrapper_sys::bindings::nvmlGpuFabricInfo_t = unsafe { std::mem::zeroed() };
    // SAFETY: the handle is NVML's own and lives as long as `nvml`; the structure is the
    // function's.
    unsafe { nvml_try(function(device.handle(), &mut info))? };
    Ok(Fabric {
        state: FabricState::of(u32::from(info.state)),
        status: info.status,
        clique: info.cliqueId,
        cluster: cluster(&info.clusterUuid),
        health: None,
    })
}

/// A UUID in its usual form.
fn cluster(bytes: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (place, byte) in bytes.iter().enumerate() {
        if [4, 6, 8, 10].contains(&place) {
            text.push('-');
        }
        // Writing to a String does not fail.
        let _unused = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvmls_addresses_are_those_of_sysfs() {
        let sysfs: PciAddress = "0000:0a:00.0".parse().unwrap();
        assert_eq!(sysfs_address("00000000:0A:00.0"), Some(sysfs));
        assert_eq!(
            sysfs_address("00000000:0A:00.0").unwrap().to_string(),
            "0000:0a:00.0"
        );
        assert_eq!(
            sysfs_address("10000:0A:00.0").unwrap().to_string(),
            "10000:0a:00.0"
        );
        assert_eq!(sysfs_address("0A:00.0"), None);
    }

    #[test]
    fn a_cluster_is_a_uuid() {
        let bytes: [u8; 16] = std::array::from_fn(|n| n as u8);
        assert_eq!(cluster(&bytes), "00010203-0405-0607-0809-0a0b0c0d0e0f");
    }
}
