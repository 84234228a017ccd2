//! A reset of a GPU that an earlier guest left half initialised: unbind, reset, bind.
//!
//! The driver reports such a GPU when its initialisation fails (WPR2 is up, invalid state). Nothing
//! that the kernel caches shows it before: the register that does is behind BAR 0, at a place that
//! depends on the chip. The reset therefore follows the first failure. The GPU is unbound first: it
//! cannot be opened until it is bound again, as another arrival, whose failure is final: a reset is
//! remembered by address and inode, which stay over the bind and change when a GPU is plugged in. A
//! working GPU is never reset, nor a second one for the sake of the first.

use super::failed::{Failed, diagnose, failed};
use super::previous::{self, Previous};
use super::publication::Update;
use super::schedule_messages::GpuId;
use super::shared::Shared;
use crate::config::Switch;
use crate::gpu::bind::{PciSysfs, SysfsError};
use crate::machine::confidential;
use crate::machine::threads;
use crate::machine::threads::Panicked;
use crate::step;
use kata_gpu_wire::failure::{FailedStep, Reason};
use kata_gpu_wire::names;
use kata_gpu_wire::pci_address::PciAddress;
use std::sync::Arc;

/// Ways to reset one function and no other, the best first. The kernel offers `bus` only for a
/// function that is alone on its bus.
const METHODS: [&str; 2] = ["flr", "bus"];

/// Begins the reset of a GPU that needs one. None: it is under way, and the GPU comes back or
/// leaves. Else the failure, with the reason why there is no reset.
pub async fn instead_of(
    mut failure: Failed,
    shared: &Arc<Shared>,
    gpu: GpuId,
    since_ns: u64,
) -> Option<Failed> {
    if failure.step != FailedStep::Init {
        return Some(failure);
    }
    let words = shared.words(gpu, since_ns, &failure).await;
    if diagnose(&failure, &words, &shared.facts(gpu)).reason != Reason::NeedsReset {
        return Some(failure);
    }
    // Another GPU may be there by now.
    if !shared.roster.contains(gpu) {
        return Some(failure);
    }
    let resets = || threads::lock(&shared.resets);
    let device = shared.roster.device(gpu.address);
    let again = resets().get(&gpu.address) == Some(&device);
    let methods = shared.sysfs.reset_methods(gpu.address);
    match method(
        shared.config.reset,
        confidential::is_confidential(),
        again,
        methods.as_deref(),
    ) {
        Ok(method) => {
            resets().insert(gpu.address, device);
            shared.roster.returns(gpu.address);
            let shared = Arc::clone(shared);
            tokio::spawn(run(shared, gpu, device, since_ns, failure, method));
            None
        }
        Err(why) => {
            failure.error = format!("{}; {why}", failure.error);
            Some(failure)
        }
    }
}

/// The way to reset, or the reason why not.
fn method(
    asked: Switch,
    confidential: bool,
    again: bool,
    offered: Option<&str>,
) -> Result<&'static str, String> {
    let way = |method: &&&str| {
        offered.is_some_and(|offered| offered.split_whitespace().any(|word| word == **method))
    };
    match (asked, METHODS.iter().find(way)) {
        (Switch::Off, _) => Err("not reset: gpuinit.reset=off".into()),
        // The reset clears the GPU's attestation state, and the host carries it out.
        (Switch::Auto, _) if confidential => {
            Err("not reset: this guest is confidential; gpuinit.reset=on allows it".into())
        }
        (Switch::Auto | Switch::On, _) if again => {
            Err("one reset of this GPU was tried in this boot already".into())
        }
        (Switch::Auto | Switch::On, Some(method)) => Ok(method),
        (Switch::Auto | Switch::On, None) => Err(format!(
            "not reset: the kernel offers {:?} for this function, want flr or bus",
            offered.unwrap_or_default().trim()
        )),
    }
}

/// Runs the reset. This is not the GPU's task, which ends with the unbind.
async fn run(
    shared: Arc<Shared>,
    gpu: GpuId,
    inode: Option<u64>,
    since_ns: u64,
    failure: Failed,
    method: &'static str,
) {
    let reason = Reason::NeedsReset;
    let step = step!(names::GPU_RESET, gpu = %gpu.address, method, inode, reason = %reason);
    let (sysfs, address) = (shared.sysfs.clone(), gpu.address);
    let ended = threads::run(move || {
        let mut is_bound = false;
        let result = step.run(|| {
            sysfs.unbind(address)?;
            let (bound, result) = reset_and_bind(&sysfs, address, Some(method));
            is_bound = bound;
            result
        });
        if is_bound { Ok(()) } else { result }
    });
    report(&shared, gpu, since_ns, failure, ended.await).await;
}

/// Resets an unbound GPU and binds it, as another arrival; returns whether it is bound, and the
/// first error. Blocks, for up to a minute where the GPU does not answer: call on a thread of its
/// own.
fn reset_and_bind(
    sysfs: &PciSysfs,
    gpu: PciAddress,
    method: Option<&str>,
) -> (bool, Result<(), SysfsError>) {
    let reset = method.map_or(Ok(()), |method| sysfs.reset(gpu, method));
    // Bound again in any case: without a driver, the GPU would leave without a failure.
    let bound = sysfs.bind(gpu);
    (bound.is_ok(), reset.and(bound))
}

/// Reports the failure of a GPU that is not bound after its reset. No event shows that: the GPU has
/// left with its unbind, and only a bind is another arrival.
async fn report(
    shared: &Shared,
    gpu: GpuId,
    since_ns: u64,
    mut failure: Failed,
    ended: Result<Result<(), SysfsError>, Panicked>,
) {
    let error = match ended {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(panicked) => panicked.to_string(),
    };
    shared.roster.stays_away(gpu.address);
    // The writer is gone only with the runtime.
    let _unused = shared.spec.send(Update::Roster);
    failure.reason = Some(Reason::NeedsReset);
    failure.error = format!("{}; its reset has failed: {error}", failure.error);
    if shared.roster.contains(gpu) {
        shared.give_up(gpu, since_ns, failure).await;
    } else if shared.roster.at(gpu.address).is_none() && shared.sysfs.is_present(gpu.address) {
        shared.report_failed(gpu, since_ns, &failure, None).await;
    }
}

/// Resets and binds GPUs whose reset the death of a worker broke off between its unbind and its
/// bind. Whether the reset came about is not known; a second one of an unbound GPU does no harm.
pub fn resume(previous: &Previous, shared: &Arc<Shared>) {
    for begin in previous
        .open
        .iter()
        .filter(|begin| begin.name == names::GPU_RESET)
    {
        let is_unbound =
            |gpu: &PciAddress| shared.sysfs.is_present(*gpu) && !shared.sysfs.is_bound(*gpu);
        let Some(address) = begin.gpu.filter(is_unbound) else {
            continue;
        };
        let method = previous::text(begin, "method");
        let method = METHODS.into_iter().find(|known| Some(*known) == method);
        let gpu = GpuId {
            address,
            generation: previous
                .gpus
                .get(&address)
                .map_or(0, |known| known.slot.generation),
        };
        let failure = failed(FailedStep::Init)(&"a worker died while it reset this GPU");
        let shared = Arc::clone(shared);
        shared.roster.returns(address);
        let _unused = shared.spec.send(Update::Roster); // as above
        tokio::spawn(async move {
            let sysfs = shared.sysfs.clone();
            let ended = threads::run(move || match reset_and_bind(&sysfs, address, method) {
                (true, _) => Ok(()),
                (false, result) => result,
            });
            report(&shared, gpu, 0, failure, ended.await).await;
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::bring_up::shared::tests::{arrive, shared};
    use crate::config::Config;
    use crate::gpu::bind::{Bound, Sight};
    use kata_gpu_test_support::temp_dir;

    #[tokio::test]
    async fn a_gpu_is_reset_once_and_one_that_is_plugged_in_there_once_more() {
        let folder = temp_dir();
        let config = Config {
            reset: Switch::On,
            ..Config::default()
        };
        let (shared, _orders, _updates) = shared(config, folder.path());
        let gpu = arrive(&shared);
        let function = folder
            .path()
            .join(format!("bus/pci/devices/{}", gpu.address));
        std::fs::create_dir_all(&function).unwrap();
        std::fs::write(function.join("reset_method"), "flr bus\n").unwrap();
        let see = |device, bind| {
            shared
                .roster
                .observe(gpu.address, Sight { device, bind }, None)
        };
        let bound = |device, bind| Bound {
            address: gpu.address,
            device,
            bind,
        };
        let fails = |gpu: GpuId| {
            let failure = Failed::new(
                FailedStep::Init,
                Some(Reason::NeedsReset),
                "it fails".into(),
            );
            let shared = &shared;
            async move { instead_of(failure, shared, gpu, 0).await }
        };
        assert!(fails(gpu).await.is_none(), "no reset was begun");
        let again = fails(gpu).await.map(|failure| failure.error);
        assert!(
            again.as_ref().is_some_and(|why| why.contains("was tried")),
            "{again:?}"
        );
        // Bound again, as after a reset.
        see(Some(7), Some(1));
        assert!(shared.roster.bound(gpu, bound(7, 1)));
        see(Some(7), Some(2));
        let again = shared.roster.at(gpu.address).unwrap();
        assert_eq!(again.generation, 1);
        assert!(fails(again).await.is_some(), "a second reset was begun");
        // Unplugged and plugged in again, or another GPU.
        see(None, None);
        assert!(fails(again).await.is_some(), "a GPU that is gone was reset");
        see(Some(8), None);
        let plugged = shared.roster.at(gpu.address).unwrap();
        assert!(fails(plugged).await.is_none(), "no reset was begun");
        assert!(fails(plugged).await.is_some(), "a second reset was begun");
    }

    #[test]
    fn a_reset_is_tried_once_by_a_way_that_resets_one_function() {
        let auto =
            |confidential, again, offered| method(Switch::Auto, confidential, again, offered);
        assert_eq!(auto(false, false, Some("flr bus pm\n")), Ok("flr"));
        assert_eq!(auto(false, false, Some("device_specific bus\n")), Ok("bus"));
        for offered in [None, Some(""), Some("pm\n"), Some("flr_like")] {
            assert!(
                auto(false, false, offered).is_err_and(|why| why.ends_with("want flr or bus")),
                "{offered:?}"
            );
        }
        assert!(auto(false, true, Some("flr")).is_err_and(|why| why.contains("was tried")));
        assert!(auto(true, false, Some("flr")).is_err_and(|why| why.contains("gpuinit.reset=on")));
        assert_eq!(method(Switch::On, true, false, Some("flr")), Ok("flr"));
        assert!(method(Switch::On, true, true, Some("flr")).is_err());
        assert!(
            method(Switch::Off, false, false, Some("flr"))
                .is_err_and(|why| why.contains("gpuinit.reset=off"))
        );
    }
}
