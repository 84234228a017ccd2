//! The agent's way from a device name to an injected device: the crate it uses, and its loop of
//! tries, with the same errors final and the same waited for.

#[cfg(feature = "cdi")]
use container_device_interface::{
    cache::{Cache, new_cache as new_shared_cache, with_auto_refresh},
    spec_dirs::with_spec_dirs,
};
use oci_spec::runtime::Spec;
use std::collections::HashSet;
#[cfg(feature = "cdi")]
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The one directory the agent reads.
pub const DIRECTORY: &str = "/var/run/cdi";
/// Between two tries.
const TRY_EVERY: Duration = Duration::from_secs(1);

/// Callback for a failed try: its number and its error, for the log.
pub type OnFailedTry<'a> = &'a mut dyn FnMut(u64, &str);

/// The specs of a directory, before the crate that the agent uses.
#[cfg(feature = "cdi")]
fn new_cache(directory: &str) -> Arc<Mutex<Cache>> {
    new_shared_cache(vec![with_auto_refresh(false), with_spec_dirs(&[directory])])
}
/// Without that crate, for the demo.
#[cfg(not(feature = "cdi"))]
use super::cdi_json::new_cache;

/// Devices of the asked names whose kind is there and does not list them.
fn unsatisfiable(available: &[String], asked: &[String]) -> Vec<String> {
    let kind = |device: &str| device.split_once('=').map(|(kind, _)| kind.to_string());
    let kinds: HashSet<String> = available.iter().filter_map(|d| kind(d)).collect();
    asked.iter().filter(|d| kind(d).is_some_and(|k| kinds.contains(&k)) && !available.contains(d)).cloned().collect()
}

/// Injects devices into an OCI spec, as the agent does: `timeout_s + 1` tries. Gives the number of
/// tries it took.
///
/// Final at once: a spec directory that does not load; with `fail_fast`, a device that is not
/// listed under a kind that is there. Waited for: everything else.
pub fn inject(
    spec: &mut Spec,
    directory: &str,
    devices: &[String],
    timeout_s: u64,
    fail_fast: bool,
    sleep: &dyn Fn(Duration),
    on_failed_try: OnFailedTry,
) -> Result<u64, (u64, String)> {
    let cache = new_cache(directory);
    for i in 0..=timeout_s {
        let (missing, result) = {
            let mut cache = cache.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            if let Err(error) = cache.refresh() {
                return Err((i + 1, format!("error refreshing cache: {error:?}")));
            }
            (unsatisfiable(&cache.list_devices(), devices), cache.inject_devices(Some(spec), devices.to_vec()))
        };
        match result {
            Ok(_) => return Ok(i + 1),
            Err(error) if fail_fast && !missing.is_empty() => {
                let error = format!(
                    "CDI device(s) {missing:?} do not exist; their CDI kind(s) are present in {directory} but do not provide them: {error:?}"
                );
                return Err((i + 1, error));
            }
            Err(error) => {
                on_failed_try(i + 1, &format!("{error:?}"));
                sleep(TRY_EVERY);
            }
        }
    }
    Err((timeout_s + 1, format!("failed to inject devices after CDI timeout of {timeout_s} seconds")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::path::PathBuf;

    const READY: &str = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/null","type":"c","major":1,"minor":3,"fileMode":438}]}}]}"#;
    const PENDING: &str = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"deviceNodes":[{"path":"/run/none/0001:00:00.0"}]}}]}"#;

    struct Directory(PathBuf);

    impl Directory {
        fn new(test: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kata-gpu-tests-cdi-{test}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
        fn put(&self, text: &str) {
            std::fs::write(self.0.join("x.tmp"), text).unwrap();
            std::fs::rename(self.0.join("x.tmp"), self.0.join("nvidia.yaml")).unwrap();
        }
        /// Asks for a device; `later` is put in place during the first pause.
        fn ask(&self, device: &str, fail_fast: bool, later: Option<&str>) -> (Result<u64, (u64, String)>, Spec) {
            let mut spec = Spec::default();
            let slept = Cell::new(0);
            let sleep = |_: Duration| {
                slept.set(slept.get() + 1);
                if let (1, Some(text)) = (slept.get(), later) {
                    self.put(text);
                }
            };
            let asked = [format!("nvidia.com/gpu={device}")];
            let result = inject(&mut spec, self.0.to_str().unwrap(), &asked, 3, fail_fast, &sleep, &mut |_, _| {});
            (result, spec)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _unused = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_pending_device_is_retried_and_the_container_stays_as_it_is() {
        let directory = Directory::new("pending");
        directory.put(PENDING);
        let (result, spec) = directory.ask("0", true, None);
        assert_eq!(result.unwrap_err(), (4, "failed to inject devices after CDI timeout of 3 seconds".into()));
        assert_eq!(spec, Spec::default());
    }

    #[test]
    fn a_pending_device_that_appears_is_injected_at_the_next_try() {
        let directory = Directory::new("real");
        directory.put(PENDING);
        let (result, spec) = directory.ask("0", true, Some(READY));
        assert_eq!(result, Ok(2));
        assert_ne!(spec, Spec::default());
    }

    #[test]
    fn an_absent_kind_is_waited_for() {
        let directory = Directory::new("absent");
        assert_eq!(directory.ask("0", true, Some(READY)).0, Ok(2));
    }

    #[test]
    fn a_torn_file_fails_at_once() {
        let directory = Directory::new("torn");
        directory.put(&READY[..READY.len() / 2]);
        let (tries, error) = directory.ask("0", true, Some(READY)).0.unwrap_err();
        assert_eq!(tries, 1, "{error}");
    }

    #[test]
    fn a_bad_file_fails_at_once_and_a_temporary_one_is_not_read() {
        let directory = Directory::new("unrelated");
        directory.put(READY);
        std::fs::write(directory.0.join("other.tmp"), "{").unwrap();
        assert_eq!(directory.ask("0", true, None).0, Ok(1));
        std::fs::write(directory.0.join(".other.JSON"), "{").unwrap();
        let (tries, error) = directory.ask("0", true, None).0.unwrap_err();
        assert_eq!(tries, 1, "{error}");
    }

    #[test]
    fn one_device_in_two_files_fails_at_once() {
        let directory = Directory::new("conflict");
        directory.put(READY);
        std::fs::write(directory.0.join("second.yaml"), READY.replace(r#""name":"0""#, r#""name":"1""#)).unwrap();
        assert_eq!(directory.ask("1", true, None).0, Ok(1));
        std::fs::write(directory.0.join("second.yaml"), READY).unwrap();
        let (tries, error) = directory.ask("0", true, None).0.unwrap_err();
        assert!(tries == 1 && error.contains("error refreshing cache"), "{tries} {error}");
    }

    #[test]
    fn the_agent_tries_once_a_second_and_once_at_the_timeout() {
        let (slept, looks) = (Cell::new(Duration::ZERO), Cell::new(0));
        let mut looked = |number, _: &str| {
            looks.set(looks.get() + 1);
            assert_eq!(number, looks.get());
        };
        let sleep = |time: Duration| slept.set(slept.get() + time);
        let directory = Directory::new("often");
        let asked = ["nvidia.com/gpu=0".to_string()];
        let result = inject(&mut Spec::default(), directory.0.to_str().unwrap(), &asked, 7, true, &sleep, &mut looked);
        assert_eq!(result.unwrap_err().0, 8);
        assert_eq!((slept.get(), looks.get()), (Duration::from_secs(8), 8));
    }

    #[test]
    fn an_unlisted_device_fails_at_once_since_3_32() {
        let directory = Directory::new("unlisted");
        directory.put(READY);
        let (tries, error) = directory.ask("1", true, None).0.unwrap_err();
        assert!(tries == 1 && error.contains("do not exist"), "{tries} {error}");
        let (tries, error) = directory.ask("1", false, None).0.unwrap_err();
        assert!(tries == 4 && error.contains("timeout"), "{tries} {error}");
    }
}
