//! Requests to the helper for NVML, and its answers.
//!
//! Wire: the helper's standard input and output are one socket. A request is a line of words
//! ([`Request`]), its answer a line of JSON ([`Answer`]). One request at a time.

use crate::fabric::Fabric;
use crate::pci_address::PciAddress;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// Name of the helper's program.
pub const PROGRAM: &str = "kata-gpu-nvml";
/// Name of the library that it loads; a development package's link without the number is not
/// needed.
pub const LIBRARY: &str = "libnvidia-ml.so.1";

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Facts of these GPUs, or of all if the list is empty: NVML initialises a GPU that is queried.
    Facts(Vec<PciAddress>),
    /// The facts that decide whether CUDA works: fabric and ready state.
    State(Vec<PciAddress>),
    /// Locks a GPU's clocks between two frequencies, in MHz.
    Clocks {
        gpu: PciAddress,
        clock: Clock,
        min: u32,
        max: u32,
    },
    /// Sets a GPU's power limit, in mW.
    Power { gpu: PciAddress, milliwatts: u32 },
    /// Sets the ready state of all confidential GPUs.
    Ready(bool),
}

named! {
    /// Clock domain that can be locked.
    pub enum Clock {
        Graphics = "graphics",
        Memory = "memory",
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Facts(gpus) => write_list(f, "facts", gpus),
            Self::State(gpus) => write_list(f, "state", gpus),
            Self::Clocks {
                gpu,
                clock,
                min,
                max,
            } => write!(f, "clocks {gpu} {clock} {min} {max}"),
            Self::Power { gpu, milliwatts } => write!(f, "power {gpu} {milliwatts}"),
            Self::Ready(on) => write!(f, "ready {}", if *on { "on" } else { "off" }),
        }
    }
}

fn write_list(f: &mut fmt::Formatter<'_>, word: &str, gpus: &[PciAddress]) -> fmt::Result {
    f.write_str(word)?;
    gpus.iter().try_for_each(|gpu| write!(f, " {gpu}"))
}

impl FromStr for Request {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |text: &str| text.parse::<u32>().map_err(|e| format!("{text:?}: {e}"));
        let address = |text: &str| text.parse::<PciAddress>().map_err(|e| e.to_string());
        let addresses = |texts: &[&str]| {
            texts
                .iter()
                .map(|text| address(text))
                .collect::<Result<Vec<_>, _>>()
        };
        match words[..] {
            ["facts", ref gpus @ ..] => Ok(Self::Facts(addresses(gpus)?)),
            ["state", ref gpus @ ..] => Ok(Self::State(addresses(gpus)?)),
            ["clocks", gpu, clock, min, max] => {
                let clock = Clock::named(clock)
                    .ok_or_else(|| format!("{clock:?} is no clock: want graphics or memory"))?;
                Ok(Self::Clocks {
                    gpu: address(gpu)?,
                    clock,
                    min: number(min)?,
                    max: number(max)?,
                })
            }
            ["power", gpu, milliwatts] => Ok(Self::Power {
                gpu: address(gpu)?,
                milliwatts: number(milliwatts)?,
            }),
            ["ready", "on"] => Ok(Self::Ready(true)),
            ["ready", "off"] => Ok(Self::Ready(false)),
            _ => Err(format!(
                "{line:?} is no request: want facts or state with GPUs, clocks GPU \
                    graphics|memory MIN MAX (MHz), power GPU LIMIT (mW) or ready on|off"
            )),
        }
    }
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Facts(Box<Facts>),
    Done,
    Error(String),
}

/// NVML's view of the guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    pub driver: Option<String>,
    pub nvml: Option<String>,
    /// GPUs that NVML counts.
    pub count: Option<u32>,
    /// None: a driver without it, or an error.
    pub confidential: Option<Confidential>,
    pub confidential_error: Option<String>,
    pub devices: Vec<Device>,
}

/// Confidential-computing state of the system.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Confidential {
    /// GPUs keep their memory from the host, in either way: each for itself, or by protected PCIe.
    pub enabled: bool,
    pub environment: Environment,
    pub devtools: bool,
    /// Protected PCIe: several GPUs and their switches in one guest.
    pub protected_pcie: bool,
    /// Whether GPUs take work of clients.
    pub ready: bool,
}

named! {
    /// NVML_CC_SYSTEM_ENVIRONMENT_*.
    #[derive(Default, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Environment {
        #[default]
        Unavailable = "unavailable",
        /// A simulation without protection.
        Simulated = "simulated",
        Production = "production",
    }
}

impl Environment {
    /// Environment of NVML's number.
    pub fn of(number: u32) -> Self {
        match number {
            1 => Self::Simulated,
            2 => Self::Production,
            _ => Self::Unavailable,
        }
    }
}

/// A GPU, as NVML reports it. A value is None where driver or GPU do not have it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// PCI address, in sysfs' form; None with the reason among the errors.
    pub address: Option<PciAddress>,
    pub minor: Option<u32>,
    pub uuid: Option<String>,
    pub name: Option<String>,
    pub mig: Vec<MigDevice>,
    pub persistence: Option<bool>,
    pub graphics_mhz: Option<u32>,
    pub memory_mhz: Option<u32>,
    pub power_mw: Option<u32>,
    pub power_limit_mw: Option<u32>,
    pub ecc: Option<bool>,
    /// Uncorrected errors since the driver was loaded.
    pub ecc_uncorrected: Option<u64>,
    pub remapped: Option<Remapped>,
    /// Reasons that hold the clocks down, in NVML's terms.
    pub throttle: Vec<String>,
    /// Memory of the GPU is protected: confidential computing is on.
    pub protected: Option<bool>,
    pub fabric: Option<Fabric>,
    pub nvlinks_active: Option<u32>,
    pub nvlinks: Option<u32>,
    /// Errors of single questions; what a driver or a GPU does not have is none.
    pub errors: Vec<String>,
}

/// A MIG instance, by the numbers that the driver's capabilities have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigDevice {
    pub uuid: String,
    pub gpu_instance: u32,
    pub compute_instance: u32,
}

impl fmt::Display for MigDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}/{}={}",
            self.gpu_instance, self.compute_instance, self.uuid
        )
    }
}

impl FromStr for MigDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = text.split_once('=').and_then(|(numbers, uuid)| {
            let (gi, ci) = numbers.split_once('/')?;
            Some(Self {
                uuid: uuid.to_string(),
                gpu_instance: gi.parse().ok()?,
                compute_instance: ci.parse().ok()?,
            })
        });
        found.ok_or_else(|| {
            format!("{text:?} is no MIG instance: want GPU-INSTANCE/COMPUTE-INSTANCE=UUID")
        })
    }
}

/// Separator of a list's members in a field.
pub const LIST: &str = ", ";

/// Rows of memory that are replaced by spare ones.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Remapped {
    pub correctable: u32,
    pub uncorrectable: u32,
    /// Takes effect at the next reset of the GPU.
    pub pending: bool,
    pub failed: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_survives_the_wire_and_nothing_else_is_one() {
        let gpu = "0000:01:00.0".parse().unwrap();
        for request in [
            Request::Facts(Vec::new()),
            Request::Facts(vec![gpu]),
            Request::State(vec![gpu, gpu]),
            Request::Clocks {
                gpu,
                clock: Clock::Graphics,
                min: 210,
                max: 1980,
            },
            Request::Clocks {
                gpu,
                clock: Clock::Memory,
                min: 0,
                max: u32::MAX,
            },
            Request::Power {
                gpu,
                milliwatts: 500_000,
            },
            Request::Ready(true),
            Request::Ready(false),
        ] {
            assert_eq!(request.to_string().parse(), Ok(request));
        }
        for line in [
            "",
            "fact",
            "facts all",
            "state 0000:01:00.0 all",
            "power 0000:01:00.0 -1",
            "power gpu0 5",
            "clocks 0000:01:00.0 video 1 2",
            "ready",
        ] {
            assert!(line.parse::<Request>().is_err(), "{line:?}");
        }
    }
}
