//! End of module loading, which the [`schedule`](super::schedule) orders once the driver's modules
//! are loaded.

use kata_gpu_wire::names;
use std::path::Path;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

const MODULES_DISABLED: &str = "/proc/sys/kernel/modules_disabled";
/// Longest wait for the modules of services: a load that hangs must not leave the kernel open for
/// ever.
const MODULES_FIRST: Duration = Duration::from_secs(60);
/// Pauses between tries grow from the first to the second: a shortage of memory or files passes.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));

/// Disables module loading once the services' modules are loaded. A failure is reported, once, and
/// tried again: until then modules can still be loaded.
pub async fn run(mut modules_loaded: watch::Receiver<bool>) {
    drop(timeout(MODULES_FIRST, modules_loaded.wait_for(|loaded| *loaded)).await);
    disable(Path::new(MODULES_DISABLED), PAUSES).await;
    tracing::info!(name: names::LOCKDOWN, modules_disabled = true);
}

async fn disable(file: &Path, (mut pause, longest): (Duration, Duration)) {
    let mut is_reported = false;
    while let Err(error) = std::fs::write(file, "1") {
        if !is_reported {
            let error = format!(
                "write 1 to {}: {error}: modules can still be loaded; trying again",
                file.display()
            );
            tracing::error!(name: names::LOCKDOWN, error);
        }
        is_reported = true;
        sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_support::temp_dir;

    #[tokio::test]
    async fn a_lockdown_that_fails_is_tried_again() {
        let dir = temp_dir();
        let file = dir.path().join("kernel/modules_disabled");
        let pauses = (Duration::from_millis(1), Duration::from_millis(2));
        let tries = disable(&file, pauses);
        tokio::pin!(tries);
        // The first tries fail, as there is no folder.
        assert!(timeout(pauses.1 * 4, &mut tries).await.is_err());
        std::fs::create_dir(dir.path().join("kernel")).unwrap();
        tries.await;
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "1");
    }
}
