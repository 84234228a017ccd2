//! The driver's messages that can explain a failure: messages with a GPU's address, and those
//! without any, which are nearly always the cause.
//!
//! Messages without an address are kept since the last boundary: the end of an initialisation that
//! failed, the mark of one that begins, the begin of the module's load, another GPU's probe. RM
//! counts its GPUs (`GPU0`) as they are attached, and gives the number of one that failed to the
//! next.

use kata_gpu_wire::driver_log;
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::HashMap;

/// Messages that are kept per GPU, and without a GPU.
const MAX_MESSAGES: usize = 24;
/// Most messages that are shown beside a failure that they may not be about.
const MAX_NEARBY: usize = 3;

#[derive(Default)]
pub struct DriverSaid {
    /// Messages with their number in the log.
    of_gpus: HashMap<PciAddress, Vec<(u64, String)>>,
    others: Vec<(u64, String)>,
    count: u64,
}

/// Messages for one failure.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Offer {
    /// About this GPU or no other, in order.
    pub messages: Vec<String>,
    /// Logged at that time, of whichever GPU.
    pub nearby: Vec<String>,
}

impl DriverSaid {
    /// Keeps a message that can explain a failure.
    pub fn add(&mut self, gpu: Option<PciAddress>, text: &str) {
        if !driver_log::is_drivers(text) || !driver_log::explains(text) {
            return;
        }
        self.count += 1;
        let message = (self.count, text.to_string());
        match gpu {
            Some(gpu) => {
                let lines = self.of_gpus.entry(gpu).or_default();
                if lines.len() < MAX_MESSAGES {
                    lines.push(message);
                }
            }
            None if driver_log::address(text).is_none() => {
                if self.others.len() >= MAX_MESSAGES {
                    self.others.remove(0);
                }
                self.others.push(message);
            }
            None => {}
        }
    }

    /// Forgets the messages without an address: what comes is about something else.
    pub fn boundary(&mut self) {
        self.others.clear();
    }

    /// Messages for a failure of this GPU. `is_alone`: it is the only GPU. `is_serial`: only one
    /// GPU can have been at work since the last boundary. `decides`: a message that names a cause.
    pub fn offer(
        &mut self,
        gpu: PciAddress,
        is_alone: bool,
        is_serial: bool,
        decides: impl Fn(&str) -> bool,
    ) -> Offer {
        let mut mine = self.of_gpus.remove(&gpu).unwrap_or_default();
        if is_alone {
            mine.extend(self.others.iter().cloned());
        } else if is_serial {
            mine.extend(self.of_last_instance().cloned());
        }
        mine.sort_by_key(|(at, _)| *at);
        let others = self.others.iter().filter(|message| !mine.contains(message));
        let (first, later): (Vec<_>, Vec<_>) = others.partition(|(_, text)| decides(text));
        let mut nearby: Vec<_> = first.into_iter().chain(later).take(MAX_NEARBY).collect();
        nearby.sort_by_key(|(at, _)| *at);
        Offer {
            nearby: nearby.into_iter().map(|(_, text)| text.clone()).collect(),
            messages: mine.into_iter().map(|(_, text)| text).collect(),
        }
    }

    /// Messages of the GPU that RM named last, with those behind its first that name none.
    fn of_last_instance(&self) -> impl Iterator<Item = &(u64, String)> {
        let last = self
            .others
            .iter()
            .rev()
            .find_map(|(_, text)| driver_log::rm_number(text));
        let number = driver_log::rm_number;
        let is_other = move |text: &str| number(text).is_some_and(|of| Some(of) != last);
        let others = self.others.iter().rposition(|(_, text)| is_other(text));
        let from = others.map_or(0, |at| at + 1);
        self.others.iter().skip(from)
    }

    pub fn without_gpu(&self) -> Vec<String> {
        self.others.iter().map(|(_, text)| text.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(bus: u8) -> PciAddress {
        format!("0000:{bus:02x}:00.0").parse().unwrap()
    }

    fn said(messages: &[&str]) -> DriverSaid {
        let mut said = DriverSaid::default();
        for text in messages {
            said.add(driver_log::address(text), text);
        }
        said
    }

    const CAUSE: &str = "NVRM: GPU0 a_IMPL: the cause";
    const ITS: &str = "NVRM: GPU 0000:01:00.0: RmInitAdapter failed! (0x22:0x38:878)";

    #[test]
    fn a_message_without_an_address_is_the_only_gpus() {
        let offer = said(&[CAUSE, "NVRM: none", ITS]).offer(gpu(1), true, false, |_| true);
        assert_eq!(offer.messages, [CAUSE, "NVRM: none", ITS]);
        assert!(offer.nearby.is_empty());
    }

    #[test]
    fn of_several_gpus_it_counts_only_in_a_known_order() {
        let all = [CAUSE, "NVRM: x", "NVRM: y", "NVRM: GPU0 z: w", ITS];
        let offer = said(&all).offer(gpu(1), false, false, |text| text.contains('w'));
        assert_eq!(offer.messages, [ITS]);
        assert_eq!(offer.nearby, [CAUSE, "NVRM: x", "NVRM: GPU0 z: w"]);
        let offer = said(&all).offer(gpu(1), false, true, |_| true);
        assert_eq!(offer.messages, all);
        // Another GPU, with another number, was initialised before it.
        let before = ["NVRM: GPU3 b_IMPL: of another", CAUSE, ITS];
        let offer = said(&before).offer(gpu(1), false, true, |_| true);
        assert_eq!(
            (offer.messages.len(), offer.nearby),
            (2, vec![before[0].into()])
        );
    }

    #[test]
    fn messages_before_a_boundary_are_of_something_else() {
        let mut said = said(&[CAUSE, ITS]);
        said.boundary();
        assert_eq!(said.offer(gpu(1), true, true, |_| true).messages, [ITS]);
    }

    #[test]
    fn only_the_drivers_own_messages_count() {
        let mut said = said(&[
            "python3[77]: segfault at 0 in NVRM: Xid",
            "NVRM: Xid (PCI:[123]: segfault at 0",
            "audit: NVRM: x",
            "NVRM: gpuClearX_GA100: FBHUB Interrupt detected. Clearing it.",
            "NVRM: GPU 0000:02:00.0: of another GPU",
        ]);
        let nothing = Offer::default();
        assert_eq!(said.offer(gpu(1), true, true, |_| true), nothing);
    }
}
