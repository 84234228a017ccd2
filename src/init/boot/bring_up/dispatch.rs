//! Transport of facts to the [`Schedule`] and of its orders to their receivers: each GPU's task
//! gets the orders of its GPU, the fleet all others.

use super::schedule::Schedule;
use super::schedule_messages::{Fact, GpuId, Order, Time};
use crate::machine::clock::boottime_ns;
use crate::machine::threads;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

/// Orders of one GPU, in the sequence of its steps.
pub type Orders = mpsc::UnboundedReceiver<Order>;

/// The schedule, shared by all tasks.
pub struct Dispatch {
    state: Mutex<State>,
    /// Wakes the timer after a fact.
    changed: Notify,
}

struct State {
    schedule: Schedule,
    gpus: HashMap<GpuId, mpsc::UnboundedSender<Order>>,
    fleet: mpsc::UnboundedSender<Order>,
}

/// Time since the boot, the schedule's clock.
pub fn now() -> Time {
    Duration::from_nanos(boottime_ns())
}

impl Dispatch {
    /// Makes the dispatch and its timer; returns the fleet's orders as well. Must be called inside
    /// the runtime.
    pub fn start(schedule: Schedule) -> (Arc<Self>, Orders) {
        let (fleet, orders) = mpsc::unbounded_channel();
        let state = Mutex::new(State {
            schedule,
            gpus: HashMap::new(),
            fleet,
        });
        let dispatch = Arc::new(Self {
            state,
            changed: Notify::new(),
        });
        tokio::spawn(Arc::clone(&dispatch).keep_time());
        (dispatch, orders)
    }

    /// Returns the orders of a GPU; must be called before the GPU is reported as found.
    pub fn orders_of(&self, gpu: GpuId) -> Orders {
        let (sender, orders) = mpsc::unbounded_channel();
        self.lock().gpus.insert(gpu, sender);
        orders
    }

    /// Reports a fact. Orders that follow from the fact are sent before this returns.
    pub fn report(&self, fact: Fact) {
        let mut state = self.lock();
        let orders = state.schedule.take(now(), fact);
        state.deliver(orders);
        if let Fact::Gone(gpu) = fact {
            state.gpus.remove(&gpu);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Whether a GPU is usable.
    pub fn is_usable(&self, gpu: GpuId) -> bool {
        self.lock().schedule.is_usable(gpu)
    }

    /// Whether all GPUs are usable or failed.
    pub fn is_settled(&self) -> bool {
        self.lock().schedule.is_settled()
    }

    /// Calls the schedule whenever one of its deadlines passes.
    async fn keep_time(self: Arc<Self>) {
        loop {
            let deadline = {
                let mut state = self.lock();
                let orders = state.schedule.wake(now());
                state.deliver(orders);
                state.schedule.deadline(now())
            };
            let passed = async {
                match deadline {
                    // A deadline of the table.
                    Some(at) => tokio::time::sleep(at.saturating_sub(now())).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = passed => {}
                () = self.changed.notified() => {}
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        threads::lock(&self.state)
    }
}

impl State {
    fn deliver(&self, orders: Vec<Order>) {
        for order in orders {
            let receiver = match &order {
                Order::Enable(gpu, _) | Order::Probe(gpu, _) | Order::Initialise(gpu) => {
                    self.gpus.get(gpu)
                }
                Order::Chosen(..)
                | Order::Load { .. }
                | Order::Wait(_)
                | Order::LaneOver
                | Order::Late(..)
                | Order::Settled { .. }
                | Order::LockDown => Some(&self.fleet),
            };
            // Sending fails where the receiving task has ended.
            let _unused = receiver.map(|receiver| receiver.send(order));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::boot::bring_up::deadlines::Limit;
    use crate::boot::bring_up::schedule_messages::{Arrival, Probe};
    use crate::boot::bring_up::shared::tests::facts;
    use crate::boot::bring_up::strategy::Policy;
    use crate::config::Bind;

    /// Ends the wait for an order that never comes.
    const HANG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn a_limit_that_follows_from_a_fact_passes_without_another_fact() {
        let policy = Policy {
            bind: Bind::Insmod,
            ..Policy::unconfigured(facts())
        };
        // The limits of a bring-up's begin are over: there is nothing to wait for.
        let began = now().saturating_sub(Limit::AgentFirst.after());
        let (dispatch, _fleet) = Dispatch::start(Schedule::new(policy, began));
        tokio::task::yield_now().await;
        let gpu = GpuId {
            address: "0001:00:03.0".parse().unwrap(),
            generation: 0,
        };
        let mut orders = dispatch.orders_of(gpu);
        for fact in [
            Fact::Found(gpu, Arrival::Boot),
            Fact::Scanned,
            Fact::Loaded(true),
            Fact::Bound(gpu),
        ] {
            dispatch.report(fact);
        }
        assert_eq!(orders.try_recv(), Ok(Order::Probe(gpu, Probe::Load)));
        // nvidia-uvm is never loaded; the initialisation waits for it until a limit.
        assert!(orders.try_recv().is_err());
        let order = tokio::time::timeout(HANG, orders.recv()).await;
        assert_eq!(order, Ok(Some(Order::Initialise(gpu))));
    }
}
