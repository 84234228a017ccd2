//! How a world goes on: who gets which lock, and what ends when.

use super::{
    At, Fact, Fault, GROUPS, LOADER, Load, Micros, PROGRAMS, STATE_GROUPS, WATCHERS, Wait, Waiter,
    World, before_group,
};

/// Time of a part from a group of its accesses to the next one. None: there is no next one.
fn to_next_group(groups: &[u64], group: u8, whole: Micros) -> Option<Micros> {
    Some(before_group(groups, group + 1, whole)? - before_group(groups, group, whole)?)
}

impl World<'_> {
    /// The next moment at which anything happens by itself.
    pub fn next_event(&self) -> Option<Micros> {
        if self.is_frozen() {
            return self.mapping.and_then(|gpu| self.timer(gpu));
        }
        let gpus = (0..self.count()).filter_map(|k| self.timer(k));
        let functions = self
            .host
            .gpus
            .iter()
            .flat_map(|f| [f.plugged_at, f.removed_at])
            .flatten();
        let waiters = self.waiters.iter().map(|c| c.grace_ends);
        let load = match self.load {
            Load::Begins(_, at) | Load::Uvm(at) => Some(at),
            _ => None,
        };
        gpus.chain(load)
            .chain(functions)
            .chain(waiters)
            .chain(self.next_call_ends())
            .filter(|at| *at > self.now)
            .min()
    }

    /// Goes on to the next event, or to `limit` where that is earlier. False: nothing will ever
    /// happen, and there is no limit.
    pub fn advance(&mut self, limit: Option<Micros>) -> bool {
        let Some(at) = self.next_event().into_iter().chain(limit).min() else {
            return false;
        };
        self.spun += (at - self.now) * self.spinning() as Micros;
        let before = std::mem::replace(&mut self.now, at);
        self.plug_and_remove(before);
        self.settle();
        true
    }

    fn timer(&self, gpu: usize) -> Option<Micros> {
        match self.gpus[gpu].wait {
            Wait::Until(at) => Some(at),
            _ => None,
        }
    }

    /// The load needs all CPUs.
    pub(super) fn load_spins(&self) -> bool {
        match self.load {
            Load::Begins(_, at) | Load::Uvm(at) => at <= self.now,
            Load::Ends | Load::UvmEnds => true,
            Load::NotBegun | Load::Registers(..) | Load::UvmWaits | Load::Over => false,
        }
    }

    fn plug_and_remove(&mut self, before: Micros) {
        for k in 0..self.count() {
            let function = self.host.gpus[k];
            let due = |at: Option<Micros>| at.is_some_and(|at| before < at && at <= self.now);
            let (plugged, removed) = (due(function.plugged_at), due(function.removed_at));
            if plugged && self.gpus[k].at == At::Absent {
                (self.gpus[k].at, self.gpus[k].enabled, self.gpus[k].removed) =
                    (At::Present, false, false);
                self.report(Fact::Plugged(k));
            }
            if removed && self.gpus[k].at != At::Absent {
                self.gpus[k].removed = true;
                self.rest(k);
            }
        }
    }

    /// All that happens at this moment.
    pub(super) fn settle(&mut self) {
        while self.ends_mapping() || (!self.is_frozen() && self.ends_other()) {}
    }

    fn ends_other(&mut self) -> bool {
        self.ends_any() || self.ends_call() || self.load_goes_on() || self.ends_grace()
    }

    fn ends_mapping(&mut self) -> bool {
        let over = |gpu: &usize| self.timer(*gpu).is_some_and(|at| at <= self.now);
        let Some(gpu) = self.mapping.filter(over) else {
            return false;
        };
        self.kernel_mapped = self.kernel_mapped();
        self.mapping = None;
        self.gpus[gpu].enabled = true;
        // Whoever waited for this comes before the next enabling.
        for waiter in &mut self.waiters {
            waiter.grace_ends = waiter.grace_ends.min(self.now);
        }
        while self.ends_grace() || self.load_goes_on() {}
        let fails = self.host.gpus[gpu].fault == Fault::EnableFails;
        match (self.gpus[gpu].at, fails) {
            (At::Enable, _) => {
                self.stay(gpu, if fails { At::Failed } else { At::Enabled });
                self.report(Fact::Enabled(gpu, !fails));
            }
            (_, true) => self.end_probe(gpu, false),
            (_, false) => self.go(gpu, At::Probe, self.host.gpus[gpu].times.probe),
        }
        while self.mapping.is_none()
            && let Some(next) = self.for_host.pop()
        {
            self.host_granted(next);
        }
        true
    }

    fn go(&mut self, gpu: usize, at: At, time: Micros) {
        self.gpus[gpu].at = at;
        self.gpus[gpu].wait = Wait::Until(self.now + time);
    }

    fn stay(&mut self, gpu: usize, at: At) {
        self.gpus[gpu].at = at;
        self.gpus[gpu].wait = Wait::Nothing;
        self.rest(gpu);
    }

    /// A GPU that was torn out goes as soon as no thread of the kernel is at it: the removal waits
    /// for its device lock, which `enable` and probes hold, and for the end of an initialisation
    /// (`pci_stop_dev`, then the event of `device_del`).
    fn rest(&mut self, gpu: usize) {
        let before_bind = matches!(self.gpus[gpu].at, At::Present | At::Enabled);
        let after_bind = matches!(
            self.gpus[gpu].at,
            At::Bound | At::Known | At::Usable | At::Failed
        );
        if (before_bind || after_bind) && self.gpus[gpu].removed {
            self.gpus[gpu].at = At::Absent;
            self.report(Fact::Removed(gpu));
        }
    }

    pub(super) fn wait_for_host(&mut self, gpu: usize) {
        if self.mapping.is_none() {
            self.host_granted(gpu);
        } else {
            self.gpus[gpu].wait = Wait::Host;
            self.for_host.push(gpu);
        }
    }

    fn host_granted(&mut self, gpu: usize) {
        match self.gpus[gpu].at {
            At::Enable | At::ProbeEnable => {
                self.mapping = Some(gpu);
                self.gpus[gpu].wait = Wait::Until(self.now + self.host.gpus[gpu].times.enable);
            }
            At::Uuid => {
                self.release_driver();
                let bound =
                    self.host.gpus[gpu].fault != Fault::ProbeFails && !self.gpus[gpu].removed;
                self.end_probe(gpu, bound);
            }
            At::Look => {
                self.release_driver();
                self.stay(gpu, At::Known);
                self.report(Fact::Looked(gpu));
            }
            At::Attach(group) => {
                match to_next_group(&GROUPS, group, self.host.gpus[gpu].times.s1) {
                    Some(time) => self.go(gpu, At::Attach(group + 1), time),
                    None => self.boot(gpu),
                }
            }
            At::State(group) => {
                if let Some(time) =
                    to_next_group(&STATE_GROUPS, group, self.host.gpus[gpu].times.s3)
                {
                    self.go(gpu, At::State(group + 1), time);
                }
            }
            at => unreachable!("GPU {gpu} waits for the host: {at:?}"),
        }
    }

    pub(super) fn wait_for_driver(&mut self, who: usize) {
        if self.driver_holder.is_none() {
            self.driver_granted(who);
        } else {
            if who < LOADER {
                self.gpus[who].wait = Wait::Driver;
            }
            self.for_driver.push(who);
        }
    }

    fn driver_granted(&mut self, who: usize) {
        self.driver_holder = Some(who);
        match who {
            LOADER => {
                self.load = Load::UvmEnds;
                self.release_driver();
            }
            WATCHERS..PROGRAMS => {
                let gpu = who - WATCHERS;
                // Asked too early: the S1 waits for A itself.
                if matches!(self.gpus[gpu].at, At::Attach(_)) {
                    self.for_driver.push(who);
                } else {
                    self.report(Fact::Seen(gpu));
                }
                self.release_driver();
            }
            PROGRAMS.. => self.call_granted(who - PROGRAMS),
            _ => match self.gpus[who].at {
                At::State(_) => self.gpus[who].wait = Wait::EveryGpu,
                _ => self.wait_for_host(who),
            },
        }
    }

    pub(super) fn release_driver(&mut self) {
        self.driver_holder = None;
        if let Some(next) = self.for_driver.pop() {
            self.driver_granted(next);
        }
    }

    pub(super) fn begin_probe(&mut self, gpu: usize) {
        let function = self.host.gpus[gpu];
        if function.fault == Fault::ProbeHangs {
            self.stay(gpu, At::Hung);
        } else if function.times.firewall > 0 {
            self.go(gpu, At::Sleep, function.times.firewall);
        } else {
            self.probe_enables(gpu);
        }
    }

    fn probe_enables(&mut self, gpu: usize) {
        if self.gpus[gpu].enabled {
            self.go(gpu, At::Probe, self.host.gpus[gpu].times.probe);
        } else {
            self.gpus[gpu].at = At::ProbeEnable;
            self.wait_for_host(gpu);
        }
    }

    fn end_probe(&mut self, gpu: usize, bound: bool) {
        self.stay(gpu, if bound { At::Bound } else { At::Failed });
        self.report(Fact::Probed(gpu, bound));
    }

    /// S1 is over.
    fn boot(&mut self, gpu: usize) {
        let function = self.host.gpus[gpu];
        if function.fault == Fault::InitHangs {
            self.stay(gpu, At::Hung);
        } else {
            self.go(gpu, At::Boot, function.times.s2);
        }
        self.report(Fact::Attached(gpu));
        if self.host.relaxed {
            self.release_driver();
        }
    }

    /// Somebody is in S2.
    pub(super) fn any_boots(&self) -> bool {
        (0..self.count()).any(|k| match self.gpus[k].at {
            At::Boot => true,
            At::Hung => self.host.gpus[k].fault == Fault::InitHangs,
            _ => false,
        })
    }

    /// Ends one timer that is due, or begins one S3 whose G's are all free; false if there is
    /// neither.
    fn ends_any(&mut self) -> bool {
        for gpu in 0..self.count() {
            match self.gpus[gpu].wait {
                Wait::Until(at) if at <= self.now && self.mapping != Some(gpu) => {
                    self.ends(gpu);
                    return true;
                }
                Wait::EveryGpu if !self.any_boots() => {
                    self.gpus[gpu].wait = Wait::Nothing;
                    self.wait_for_host(gpu);
                    return true;
                }
                _ => {}
            }
        }
        false
    }

    fn ends(&mut self, gpu: usize) {
        let function = self.host.gpus[gpu];
        match self.gpus[gpu].at {
            At::Sleep => self.probe_enables(gpu),
            At::Probe => {
                self.gpus[gpu].at = At::Uuid;
                self.wait_for_driver(gpu);
            }
            At::Attach(_) => self.wait_for_host(gpu),
            At::Boot if function.fault == Fault::InitFails || self.gpus[gpu].removed => {
                self.report(Fact::Initialised(gpu, false));
                self.stay(gpu, At::Failed);
                if !self.host.relaxed {
                    self.release_driver();
                }
            }
            At::Boot => {
                self.gpus[gpu].at = At::State(0);
                if self.host.relaxed {
                    self.wait_for_driver(gpu);
                } else {
                    self.gpus[gpu].wait = Wait::EveryGpu;
                }
            }
            At::State(group) if usize::from(group) + 1 < STATE_GROUPS.len() => {
                self.wait_for_host(gpu);
            }
            At::State(_) => {
                self.report(Fact::Initialised(gpu, true));
                self.stay(gpu, At::Usable);
                self.release_driver();
            }
            at => unreachable!("a timer of GPU {gpu}: {at:?}"),
        }
    }

    /// The driver core holds the device's lock for its probe.
    fn is_probing(&self, gpu: usize) -> bool {
        matches!(
            self.gpus[gpu].at,
            At::Sleep | At::ProbeEnable | At::Probe | At::Uuid
        ) || (self.gpus[gpu].at == At::Hung && self.host.gpus[gpu].fault == Fault::ProbeHangs)
    }

    fn is_plugged(&self, gpu: usize) -> bool {
        self.host.gpus[gpu]
            .plugged_at
            .is_some_and(|at| at <= self.now)
    }

    /// Last time at which the host mapped a GPU that was plugged in, for a probe by the kernel.
    pub fn kernel_mapped(&self) -> Option<Micros> {
        let maps = |gpu: &usize| self.is_plugged(*gpu) && self.gpus[*gpu].at == At::ProbeEnable;
        self.mapping
            .filter(maps)
            .map(|_| self.now)
            .or(self.kernel_mapped)
    }

    fn load_goes_on(&mut self) -> bool {
        let free = self.mapping.is_none();
        match self.load {
            Load::Begins(first, at) if free && at <= self.now => {
                self.load = Load::Registers(first, 0)
            }
            Load::Registers(first, step) => {
                let gpu = if step == 0 { first } else { step - 1 };
                let free = matches!(self.gpus[gpu].at, At::Present | At::Enabled);
                if self.load_probes & 1 << gpu != 0 && free {
                    self.load_probes &= !(1 << gpu);
                    self.begin_probe(gpu);
                }
                if self.is_probing(gpu)
                    || self.load_probes & 1 << gpu != 0 && self.gpus[gpu].at == At::Enable
                {
                    return false;
                }
                if step < self.count() {
                    self.load = Load::Registers(first, step + 1);
                } else if (0..self.count()).any(|gpu| self.is_plugged(gpu) && self.is_probing(gpu))
                {
                    // The bus lists a GPU that was plugged in behind all others.
                    return false;
                } else if self.counts(|at| matches!(at, At::Bound | At::Look | At::Known)) > 0 {
                    self.load = Load::Ends;
                } else {
                    self.load = Load::NotBegun;
                    self.report(Fact::Loaded(false));
                }
            }
            Load::Ends if free => {
                let [_, uvm] = self.host.load.unwrap_or_default();
                self.load = Load::Uvm(self.now + uvm);
                self.report(Fact::Loaded(true));
            }
            Load::Uvm(at) if free && at <= self.now => {
                self.load = Load::UvmWaits;
                self.wait_for_driver(LOADER);
            }
            Load::UvmEnds if free => {
                self.load = Load::Over;
                self.report(Fact::UvmLoaded);
            }
            _ => return false,
        }
        true
    }

    fn ends_grace(&mut self) -> bool {
        if self.mapping.is_some() {
            return false;
        }
        let Some(at) = self.waiters.iter().position(|c| c.grace_ends <= self.now) else {
            return false;
        };
        let Waiter { who, left, .. } = self.waiters[at];
        if left > 1 {
            self.waiters[at] = Waiter {
                who,
                left: left - 1,
                grace_ends: self.now + self.host.grace.max(1),
            };
        } else {
            self.waiters.remove(at);
            self.report(Fact::Waited(who));
        }
        true
    }
}
