//! A GPU's part of an NVLink fabric, as NVML reports it.

use serde::{Deserialize, Serialize};

/// A GPU's part of the NVLink fabric.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Fabric {
    pub state: FabricState,
    /// NVML's return code; 0 is success. Counts only in state `Completed`.
    pub status: u32,
    pub clique: u32,
    pub cluster: String,
    /// None: a driver without it.
    pub health: Option<u32>,
}

named! {
    /// NVML_GPU_FABRIC_STATE_*.
    #[derive(Default, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum FabricState {
        #[default]
        NotSupported = "not supported",
        NotStarted = "not started",
        InProgress = "in progress",
        Completed = "completed",
        Unknown = "unknown",
    }
}

impl FabricState {
    /// State of NVML's number.
    pub fn of(number: u32) -> Self {
        match number {
            0 => Self::NotSupported,
            1 => Self::NotStarted,
            2 => Self::InProgress,
            3 => Self::Completed,
            _ => Self::Unknown,
        }
    }
}

/// Parts of the fabric's health mask: shift of each two bits, and the problem where they are 1
/// (NVML_GPU_FABRIC_HEALTH_MASK_*: 0 not supported, 1 true, 2 false).
const HEALTH: [(u32, &str); 4] = [
    (0, "bandwidth is degraded"),
    (2, "a route is being recovered"),
    (ROUTE, "a route is unhealthy"),
    (6, "an access timeout is being recovered"),
];
/// Shift of the part for unhealthy routes.
const ROUTE: u32 = 4;
/// Shift of the four bits of the configuration, and the problem for each number from 2 on; 1 is
/// none.
const CONFIGURATION: u32 = 8;
const MISCONFIGURED: [&str; 6] = [
    "the system's GUID is wrong",
    "the chassis' serial number is wrong",
    "the GPU is in no partition",
    "too few NVLinks are up",
    "the GPU's firmware does not fit",
    "the GPU's place is not valid",
];

impl Fabric {
    /// Whether the GPU is in a fabric that is not complete yet: CUDA fails on it.
    pub fn is_incomplete(&self) -> bool {
        matches!(
            self.state,
            FabricState::NotStarted | FabricState::InProgress
        )
    }

    /// A fabric that could not be asked for.
    pub fn unknown() -> Self {
        Self {
            state: FabricState::Unknown,
            ..Self::default()
        }
    }

    /// Problem of a fabric that is complete; None: its GPUs reach each other over NVLink, or the
    /// fabric is not complete yet.
    pub fn problem(&self) -> Option<String> {
        if self.state != FabricState::Completed {
            return None;
        }
        if self.status != 0 {
            return Some(format!(
                "the fabric is complete with NVML's error {}",
                self.status
            ));
        }
        let mask = self.health.unwrap_or_default();
        let mut parts: Vec<&str> = HEALTH
            .iter()
            .filter(|(shift, _)| mask >> shift & 3 == 1)
            .map(|(_, problem)| *problem)
            .collect();
        parts.extend(self.misconfigured());
        (!parts.is_empty()).then(|| parts.join(", "))
    }

    /// The problem with what it costs, in a sentence for people.
    pub fn effect(&self) -> Option<String> {
        self.problem().map(|problem| match self.is_broken() {
            true => {
                format!("NVLink is not usable between GPUs: {problem}; collectives go over PCIe")
            }
            false => format!("NVLink is slower for now: {problem}"),
        })
    }

    /// Whether the problem keeps GPUs from reaching each other over NVLink.
    pub fn is_broken(&self) -> bool {
        let mask = self.health.unwrap_or_default();
        self.state == FabricState::Completed
            && (self.status != 0 || mask >> ROUTE & 3 == 1 || self.misconfigured().is_some())
    }

    fn misconfigured(&self) -> Option<&'static str> {
        let number = (self.health.unwrap_or_default() >> CONFIGURATION & 0xf) as usize;
        let problem = number
            .checked_sub(2)
            .map(|at| MISCONFIGURED.get(at).copied());
        problem.map(|known| known.unwrap_or("the configuration is wrong"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fabric_is_judged_only_when_it_is_complete() {
        let fabric = |state, status, health| Fabric {
            state,
            status,
            health,
            ..Fabric::default()
        };
        assert_eq!(
            fabric(FabricState::InProgress, 3, Some(0x55)).problem(),
            None
        );
        assert_eq!(fabric(FabricState::Completed, 0, None).problem(), None);
        assert_eq!(
            fabric(FabricState::Completed, 0, Some(0xaa)).problem(),
            None,
            "2 is false"
        );
        assert_eq!(
            fabric(FabricState::Completed, 999, None)
                .problem()
                .as_deref(),
            Some("the fabric is complete with NVML's error 999")
        );
        assert_eq!(
            fabric(FabricState::Completed, 0, Some(0b01_10_01))
                .problem()
                .as_deref(),
            Some("bandwidth is degraded, a route is unhealthy")
        );
        // The configuration: none of it is wrong, the GPU is in no partition, a number of a later
        // driver.
        let configured = |number: u32| fabric(FabricState::Completed, 0, Some(number << 8));
        assert_eq!(
            (configured(1).problem(), configured(0).problem()),
            (None, None)
        );
        assert_eq!(
            configured(4).problem().as_deref(),
            Some("the GPU is in no partition")
        );
        assert_eq!(
            configured(15).problem().as_deref(),
            Some("the configuration is wrong")
        );
        // A slow fabric still works.
        assert!(
            configured(4).is_broken()
                && configured(4)
                    .effect()
                    .is_some_and(|effect| effect.ends_with("collectives go over PCIe"))
        );
        let slow = fabric(FabricState::Completed, 0, Some(1));
        assert_eq!(
            (slow.is_broken(), slow.effect().as_deref()),
            (
                false,
                Some("NVLink is slower for now: bandwidth is degraded")
            )
        );
    }
}
