//! CDI specs before the crate that kata-agent uses, for the test agent and for tests.

use container_device_interface_1::cache::{Cache, new_cache, with_auto_refresh};
use container_device_interface_1::spec_dirs::with_spec_dirs;
use kata_gpu_test_guest::agent::cdi::Specs;
use oci_spec::runtime::Spec;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

struct OfTheCrate(Arc<Mutex<Cache>>);

/// The specs of a directory, as kata-agent opens them.
pub fn specs(directory: &str) -> Box<dyn Specs> {
    Box::new(OfTheCrate(new_cache(vec![
        with_auto_refresh(false),
        with_spec_dirs(&[directory]),
    ])))
}

impl OfTheCrate {
    fn cache(&self) -> MutexGuard<'_, Cache> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Specs for OfTheCrate {
    fn refresh(&mut self) -> Result<(), String> {
        self.cache().refresh().map_err(|error| format!("{error:?}"))
    }

    fn list_devices(&self) -> Vec<String> {
        self.cache().list_devices()
    }

    fn inject_devices(&mut self, spec: &mut Spec, asked: &[String]) -> Result<(), String> {
        self.cache()
            .inject_devices(Some(spec), asked.to_vec())
            .map(drop)
            .map_err(|error| format!("{error:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kata_gpu_test_guest::agent::cdi::inject;
    use kata_gpu_test_support::{TempDir, temp_dir};
    use std::cell::Cell;
    use std::time::Duration;

    const READY: &str = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/null","type":"c","major":1,"minor":3,"fileMode":438}]}}]}"#;
    const PENDING: &str = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[{"name":"0","containerEdits":{"deviceNodes":[{"path":"/run/none/0001:00:00.0"}]}}]}"#;

    struct Directory(TempDir);

    impl Directory {
        fn new() -> Self {
            Self(temp_dir())
        }
        fn put(&self, text: &str) {
            std::fs::write(self.0.path().join("x.tmp"), text).unwrap();
            std::fs::rename(
                self.0.path().join("x.tmp"),
                self.0.path().join("nvidia.yaml"),
            )
            .unwrap();
        }
        /// Asks for a device; `later` is put in place during the first pause.
        fn ask(
            &self,
            device: &str,
            fail_fast: bool,
            later: Option<&str>,
        ) -> (Result<u64, (u64, String)>, Spec) {
            let mut spec = Spec::default();
            let slept = Cell::new(0);
            let sleep = |_: Duration| {
                slept.set(slept.get() + 1);
                if let (1, Some(text)) = (slept.get(), later) {
                    self.put(text);
                }
            };
            let asked = [format!("nvidia.com/gpu={device}")];
            let result = inject(
                specs,
                &mut spec,
                self.0.path().to_str().unwrap(),
                &asked,
                3,
                fail_fast,
                &sleep,
                &mut |_, _| {},
            );
            (result, spec)
        }
    }

    #[test]
    fn a_pending_device_is_retried_and_the_container_stays_as_it_is() {
        let directory = Directory::new();
        directory.put(PENDING);
        let (result, spec) = directory.ask("0", true, None);
        assert_eq!(
            result.unwrap_err(),
            (
                4,
                "failed to inject devices after CDI timeout of 3 seconds".into()
            )
        );
        assert_eq!(spec, Spec::default());
    }

    #[test]
    fn a_pending_device_that_appears_is_injected_at_the_next_try() {
        let directory = Directory::new();
        directory.put(PENDING);
        let (result, spec) = directory.ask("0", true, Some(READY));
        assert_eq!(result, Ok(2));
        assert_ne!(spec, Spec::default());
    }

    #[test]
    fn an_absent_kind_is_waited_for() {
        let directory = Directory::new();
        assert_eq!(directory.ask("0", true, Some(READY)).0, Ok(2));
    }

    #[test]
    fn a_torn_file_fails_at_once() {
        let directory = Directory::new();
        directory.put(&READY[..READY.len() / 2]);
        let (tries, error) = directory.ask("0", true, Some(READY)).0.unwrap_err();
        assert_eq!(tries, 1, "{error}");
    }

    #[test]
    fn a_bad_file_fails_at_once_and_a_temporary_one_is_not_read() {
        let directory = Directory::new();
        directory.put(READY);
        std::fs::write(directory.0.path().join("other.tmp"), "{").unwrap();
        assert_eq!(directory.ask("0", true, None).0, Ok(1));
        std::fs::write(directory.0.path().join(".other.JSON"), "{").unwrap();
        let (tries, error) = directory.ask("0", true, None).0.unwrap_err();
        assert_eq!(tries, 1, "{error}");
    }

    #[test]
    fn one_device_in_two_files_fails_at_once() {
        let directory = Directory::new();
        directory.put(READY);
        std::fs::write(
            directory.0.path().join("second.yaml"),
            READY.replace(r#""name":"0""#, r#""name":"1""#),
        )
        .unwrap();
        assert_eq!(directory.ask("1", true, None).0, Ok(1));
        std::fs::write(directory.0.path().join("second.yaml"), READY).unwrap();
        let (tries, error) = directory.ask("0", true, None).0.unwrap_err();
        assert!(
            tries == 1 && error.contains("error refreshing cache"),
            "{tries} {error}"
        );
    }

    #[test]
    fn the_agent_tries_once_a_second_and_once_at_the_timeout() {
        let (slept, looks) = (Cell::new(Duration::ZERO), Cell::new(0));
        let mut looked = |number, _: &str| {
            looks.set(looks.get() + 1);
            assert_eq!(number, looks.get());
        };
        let sleep = |time: Duration| slept.set(slept.get() + time);
        let directory = Directory::new();
        let asked = ["nvidia.com/gpu=0".to_string()];
        let result = inject(
            specs,
            &mut Spec::default(),
            directory.0.path().to_str().unwrap(),
            &asked,
            7,
            true,
            &sleep,
            &mut looked,
        );
        assert_eq!(result.unwrap_err().0, 8);
        assert_eq!((slept.get(), looks.get()), (Duration::from_secs(8), 8));
    }

    #[test]
    fn an_unlisted_device_fails_at_once_since_3_32() {
        let directory = Directory::new();
        directory.put(READY);
        let (tries, error) = directory.ask("1", true, None).0.unwrap_err();
        assert!(
            tries == 1 && error.contains("do not exist"),
            "{tries} {error}"
        );
        let (tries, error) = directory.ask("1", false, None).0.unwrap_err();
        assert!(tries == 4 && error.contains("timeout"), "{tries} {error}");
    }
}

#[cfg(test)]
mod stand_in {
    use super::specs;
    use kata_gpu_test_guest::agent::cdi_json;
    use kata_gpu_test_support::temp_dir;
    use oci_spec::runtime::Spec;

    const SPEC: &str = r#"{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","containerEdits":{
        "env":["A=b"],
        "deviceNodes":[{"path":"/dev/shared","hostPath":"/dev/zero"}],
        "mounts":[{"hostPath":"/usr/lib/a","containerPath":"/usr/lib/a","options":["ro","bind"]}],
        "hooks":[{"hookName":"createContainer","path":"/bin/hook","args":["hook","one"]}]},
        "devices":[
        {"name":"0","containerEdits":{"deviceNodes":[
            {"path":"/dev/n0","type":"c","major":195,"minor":0,"fileMode":438}]}},
        {"name":"1","containerEdits":{"deviceNodes":[{"path":"/dev/null"}],"env":["B=c"]}},
        {"name":"2","containerEdits":{"deviceNodes":[{"path":"/run/none/0001:00:00.0"}]}}]}"#;

    /// Injects the same names with both implementations. Each returns the spec, or `None` on
    /// failure.
    fn both(asked: &[&str]) -> [Option<Spec>; 2] {
        let directory = temp_dir();
        std::fs::write(directory.path().join("nvidia.yaml"), SPEC).unwrap();
        let whole = |name: &&str| format!("nvidia.com/gpu={name}");
        let asked: Vec<String> = asked.iter().map(whole).collect();
        let (mut by_crate, mut by_us) = (Spec::default(), Spec::default());
        let path = directory.path().to_str().unwrap();
        let mut theirs = specs(path);
        theirs.refresh().unwrap();
        let mut ours = cdi_json::specs(path);
        ours.refresh().unwrap();
        let (mut their_list, mut our_list) = (theirs.list_devices(), ours.list_devices());
        their_list.sort();
        our_list.sort();
        assert_eq!(their_list, our_list);
        [
            theirs
                .inject_devices(&mut by_crate, &asked)
                .is_ok()
                .then_some(by_crate),
            ours.inject_devices(&mut by_us, &asked)
                .is_ok()
                .then_some(by_us),
        ]
    }

    #[test]
    fn what_is_injected_is_what_the_agents_crate_injects() {
        for asked in [&["0"][..], &["1"], &["0", "1"]] {
            let [by_crate, by_us] = both(asked);
            assert!(by_crate.is_some(), "{asked:?}");
            assert_eq!(by_crate, by_us, "{asked:?}");
        }
    }

    #[test]
    fn a_pending_device_and_an_unknown_one_are_errors_to_both() {
        for asked in [["2"], ["3"]] {
            assert_eq!(both(&asked), [None, None], "{asked:?}");
        }
    }
}
