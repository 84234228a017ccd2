//! The agent's way from a device name to an injected device: its loop of tries, with the same
//! errors final and the same waited for. The program chooses what reads the specs.

use oci_spec::runtime::Spec;
use std::collections::HashSet;
use std::sync::OnceLock;
use std::time::Duration;

/// The one directory the agent reads.
pub const DIRECTORY: &str = "/var/run/cdi";
/// Between two tries.
const TRY_EVERY: Duration = Duration::from_secs(1);

/// Callback for a failed try: its number and its error, for the log.
pub type OnFailedTry<'a> = &'a mut dyn FnMut(u64, &str);

/// The specs of a directory, as a crate or its stand-in reads them.
pub trait Specs {
    /// Reads the directory again.
    fn refresh(&mut self) -> Result<(), String>;
    /// Whole names of all devices.
    fn list_devices(&self) -> Vec<String>;
    /// Applies the edits of devices.
    fn inject_devices(&mut self, spec: &mut Spec, asked: &[String]) -> Result<(), String>;
}

/// Opens the specs of a directory.
pub type Open = fn(&str) -> Box<dyn Specs>;

static CHOSEN: OnceLock<Open> = OnceLock::new();

/// Has this program resolve devices so; the first choice counts.
pub fn resolve_with(open: Open) {
    CHOSEN.get_or_init(|| open);
}

/// How this program resolves devices.
pub fn chosen() -> Open {
    *CHOSEN.get().expect("the program's main chooses")
}

/// Devices of the asked names whose kind is there and does not list them.
fn unsatisfiable(available: &[String], asked: &[String]) -> Vec<String> {
    let kind = |device: &str| device.split_once('=').map(|(kind, _)| kind.to_string());
    let kinds: HashSet<String> = available.iter().filter_map(|d| kind(d)).collect();
    asked
        .iter()
        .filter(|d| kind(d).is_some_and(|k| kinds.contains(&k)) && !available.contains(d))
        .cloned()
        .collect()
}

/// Injects devices into an OCI spec, as the agent does: `timeout_s + 1` tries. Gives the number of
/// tries it took.
///
/// Final at once: a spec directory that does not load; with `fail_fast`, a device that is not
/// listed under a kind that is there. Waited for: everything else.
#[allow(
    clippy::too_many_arguments,
    reason = "the agent's loop, with what a test replaces"
)]
pub fn inject(
    open: Open,
    spec: &mut Spec,
    directory: &str,
    devices: &[String],
    timeout_s: u64,
    fail_fast: bool,
    sleep: &dyn Fn(Duration),
    on_failed_try: OnFailedTry,
) -> Result<u64, (u64, String)> {
    let mut cache = open(directory);
    for i in 0..=timeout_s {
        let (missing, result) = {
            if let Err(error) = cache.refresh() {
                return Err((i + 1, format!("error refreshing cache: {error}")));
            }
            (
                unsatisfiable(&cache.list_devices(), devices),
                cache.inject_devices(spec, devices),
            )
        };
        match result {
            Ok(_) => return Ok(i + 1),
            Err(error) if fail_fast && !missing.is_empty() => {
                let error = format!(
                    "CDI device(s) {missing:?} do not exist; their CDI kind(s) are present in \
                    {directory} but do not provide them: {error}"
                );
                return Err((i + 1, error));
            }
            Err(error) => {
                on_failed_try(i + 1, &error);
                sleep(TRY_EVERY);
            }
        }
    }
    Err((
        timeout_s + 1,
        format!("failed to inject devices after CDI timeout of {timeout_s} seconds"),
    ))
}
