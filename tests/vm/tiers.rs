//! The default tier and `all`: which VM tests only `./tests/run all` and a run by name have, and
//! why. Every test that is not listed here is in the default tier, which runs on every change: a
//! test for each promise that a simulated guest can show, and one for each place where a decision
//! reaches the kernel.

use super::harness::VmTest;
use super::{cluster, emulated_host, kata, real_driver, rootfs};

/// Files of which no test is in the default tier, and the reason.
const FILES: &[(&[VmTest], &str)] = &[
    (emulated_host::service::TESTS, WHOLE_HOST),
    (emulated_host::guests::TESTS, WHOLE_HOST),
    (emulated_host::clock::TESTS, WHOLE_HOST),
    (emulated_host::diagnosis::TESTS, WHOLE_HOST),
    (emulated_host::root::TESTS, WHOLE_HOST),
    (emulated_host::passthrough::TESTS, WHOLE_HOST),
    (emulated_host::trace::TESTS, WHOLE_HOST),
    (kata::TESTS, "boots a whole host with Kata on it"),
    (cluster::TESTS, "boots a whole host with a cluster on it"),
    (real_driver::TESTS, "builds NVIDIA's module from packages"),
    (
        rootfs::TESTS,
        "boots an image that takes ten minutes to build",
    ),
];

const WHOLE_HOST: &str = "boots a whole host and guests in it: eight minutes";

/// Further tests that are not in the default tier, by reason.
const BY_NAME: &[(&str, &[&str])] = &[
    (
        "judges the simulator or the test agent, which change rarely",
        &[
            "the_test_agent_says_on_the_console_what_the_real_one_says",
            "the_test_agent_powers_off_silently_on_the_agents_traps",
            "a_spec_on_a_run_of_another_type_is_covered",
            "a_blocked_sigchld_leaves_the_dead_unreaped",
            "a_growing_list_makes_the_agent_fail",
            "simulator_loads_and_opens_take_the_time_that_its_locks_say",
            "simulator_without_relaxation_everything_is_serial",
            "simulator_opens_behave_as_the_drivers",
        ],
    ),
    (
        "boots the same claim as a test of the default tier, with other numbers",
        &[
            "gpu_0s_container_starts_before_gpu_7_is_bound_concurrent",
            "a_failed_gpu_costs_nobody_else_on_one_and_on_eight_vcpus",
            "a_killed_worker_loses_nothing_on_one_and_on_eight_vcpus",
            "gpuinit_relaxed_off_reaches_the_driver_with_other_keys",
            "the_stream_of_each_topology_has_its_golden_shape",
            "a_new_worker_holds_a_gpu_until_its_fabric_is_complete",
            "gpus_with_an_unknown_fabric_are_degraded",
            "a_hanging_gpu_holds_the_others_for_a_bounded_time",
            "a_first_gpu_that_fails_its_probe_does_not_fail_the_load",
            "a_later_gpu_gets_the_load_after_all_early_ones_failed",
            "a_gpu_plugged_in_after_a_failed_load_gets_a_load_of_its_own",
            "a_gpu_that_a_reset_does_not_cure_fails_alone",
            "a_gpu_that_answers_no_more_after_its_reset_stops_nobody",
            "a_worker_killed_during_a_shortage_of_processes_is_replaced",
            "a_worker_killed_while_run_is_full_frees_no_numbers",
            "gpus_plugged_in_later_come_up_and_a_torn_out_one_fails_alone",
            "a_removal_needs_no_driver_and_outlives_the_worker",
            "an_unbound_gpu_comes_back_with_its_bind",
            "only_gpus_that_come_before_the_load_change_the_topology",
        ],
    ),
    (
        "walks at random, or shows that such a walk would find a fault",
        &[
            "ten_boots_of_the_soak_keep_every_promise",
            "processes_that_stop_for_a_while_lose_nothing",
            "a_gpu_closed_in_its_initialisation_is_found_by_the_soak",
            "a_name_that_leads_to_another_gpu_is_found_by_the_soak",
        ],
    ),
    (
        "one row of a table that unit tests have whole, and whose wire another test boots",
        &[
            "with_cgroups_of_version_1_services_and_containers_run",
            "a_failed_daemon_is_reported_at_its_death_with_its_last_lines",
            "a_daemon_restarts_after_pauses_that_grow",
            "fabric_managers_configuration_is_made_from_the_packages",
            "nvlsm_and_fabric_manager_get_the_first_open_port",
            "a_service_vm_has_its_switches_and_keeps_partitions",
            "a_service_that_is_wanted_and_missing_is_an_error",
            "a_flood_of_a_services_lines_costs_bounded_records",
            "persistenced_gets_uvm_persistence_after_the_fabric",
            "a_disk_that_comes_late_is_waited_for_by_its_uevent",
            "a_malformed_extension_parameter_powers_off_without_an_agent",
            "a_boot_uses_a_driver_in_a_root_of_its_own",
            "a_new_worker_completes_the_extensions_binds",
            "faults_of_the_whole_driver_have_their_reasons",
            "a_missing_uvm_is_an_error_event_not_silence",
            "a_module_that_fails_to_load_is_reported_with_errno_and_cure",
            "no_gpu_is_reset_without_a_way_or_in_a_confidential_guest",
            "nvml_makes_uuids_of_mig_instances_names_of_the_same_nodes",
            "nvml_without_its_helper_reports_settings_as_not_done",
            "nvml_that_differs_from_pci_is_an_error_of_that_gpu",
            "a_late_display_is_published_and_goes_with_its_gpu",
            "gpuinit_cdi_complete_holds_the_spec_until_it_has_instances",
        ],
    ),
    (
        "far from the usual path: no console, no vsock, a reader that misbehaves",
        &[
            "without_a_console_the_guest_boots",
            "without_vsock_the_guest_boots_all_the_same",
            "a_listener_that_hangs_up_gets_everything_when_it_reconnects",
            "a_listener_that_always_hangs_up_is_reported_three_times",
            "a_host_that_pings_and_never_reads_is_not_read_for_ever",
            "a_bare_word_on_the_command_line_makes_pid_1_no_hook",
        ],
    ),
    (
        "runs for minutes in one guest",
        &["hot_plugs_without_end_use_no_more_of_anything"],
    ),
    (
        "measures guests, and on a busy machine may find it too busy",
        &[
            "the_bound_of_the_guests_clock_holds_in_every_boot",
            "the_console_is_quiet_during_an_enabling_and_loses_nothing",
            "the_console_is_quiet_during_a_load_that_enables_by_itself",
            "a_container_that_can_start_holds_the_lane_as_reported",
            "an_import_of_a_console_agrees_with_the_stream",
        ],
    ),
    (
        "boots an image of another form than the other guests",
        &[
            "an_erofs_image_with_another_init_boots_from_its_partition",
            "an_image_boots_behind_dm_verity_with_what_install_has_written",
            "a_changed_root_or_another_root_hash_starts_no_init",
            "firmware_on_a_disk_is_in_memory_before_the_driver_asks_for_it",
            "coherent_memory_goes_online_movable_before_the_first_open",
        ],
    ),
];

/// Tests that `all` boots on arm64, too.
pub const ON_ARM64: &[&str] = &[
    "containers_load_the_guests_libcuda_and_see_only_their_gpus",
    "gpu_0s_container_starts_before_gpu_7_is_bound_pipelined",
    "a_gpu_that_fails_to_initialise_leaves_and_the_others_stay",
    "a_worker_killed_after_the_boot_leaves_the_spec_as_it_was",
    "a_gpu_that_is_removed_leaves_the_spec_and_comes_back",
    "the_stream_of_a_full_boot_has_its_golden_shape",
    "coherent_memory_goes_online_movable_before_the_first_open",
    "rootfs_sim_boots_to_a_container",
];

/// The reason why the test of this name is in no default run; none if it is in all runs.
pub fn why_only_in_all(name: &str) -> Option<&'static str> {
    let of_a_file = FILES
        .iter()
        .find(|(tests, _)| tests.iter().any(|test| test.name == name));
    let by_name = BY_NAME.iter().find(|(_, names)| names.contains(&name));
    of_a_file
        .map(|(_, why)| *why)
        .or(by_name.map(|(why, _)| *why))
}

/// Whether a test boots no guest of another architecture: it has a whole host of x86-64.
pub fn needs_x86_64(name: &str) -> bool {
    let hosts = |why: &str| why.contains("whole host");
    why_only_in_all(name).is_some_and(hosts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vm::TESTS;

    #[test]
    fn each_name_of_the_lists_is_that_of_one_test() {
        let named: Vec<&str> = BY_NAME
            .iter()
            .flat_map(|(_, names)| *names)
            .chain(ON_ARM64)
            .copied()
            .collect();
        let tests = || TESTS.iter().copied().flatten();
        for name in named {
            let found = tests().filter(|test| test.name == name).count();
            assert_eq!(found, 1, "{name}");
        }
        assert!(why_only_in_all("ten_boots_of_the_soak_keep_every_promise").is_some());
        assert!(why_only_in_all("a_test_that_is_new").is_none());
        assert!(needs_x86_64(emulated_host::clock::TESTS[0].name));
        assert!(!needs_x86_64(ON_ARM64[0]));
    }
}
