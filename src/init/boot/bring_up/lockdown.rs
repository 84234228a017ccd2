//! End of module loading, which the [`schedule`](super::schedule) orders once the driver's modules
//! are loaded.

use kata_gpu_wire::names;
use std::time::Duration;
use tokio::sync::watch;

const MODULES_DISABLED: &str = "/proc/sys/kernel/modules_disabled";
/// Longest wait for the modules of services: a load that hangs must not leave the kernel open for
/// ever.
const MODULES_FIRST: Duration = Duration::from_secs(60);

/// Disables module loading once the services' modules are loaded. A failure is reported; modules
/// can then still be loaded.
pub async fn run(mut modules_loaded: watch::Receiver<bool>) {
    drop(tokio::time::timeout(MODULES_FIRST, modules_loaded.wait_for(|loaded| *loaded)).await);
    match std::fs::write(MODULES_DISABLED, "1") {
        Ok(()) => tracing::info!(name: names::LOCKDOWN, modules_disabled = true),
        Err(error) => {
            let error =
                format!("write 1 to {MODULES_DISABLED}: {error}: modules can still be loaded");
            tracing::error!(name: names::LOCKDOWN, error);
        }
    }
}
