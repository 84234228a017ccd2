//! The driver's lines in the kernel's log, kept to explain a failure: by GPU, those without an
//! address, and what separates initialisations. Pure: lines in, words of a failure out.
//!
//! Lines without an address are nearly always the cause of a failed initialisation, which the
//! addressed line behind them only codes. They are a GPU's where only its initialisation can have
//! logged them; see [`Whose`].

use kata_gpu_wire::driver_log::{self, Boundary};
use kata_gpu_wire::failure::Facts;
use kata_gpu_wire::pci_address::PciAddress;
use std::collections::{HashMap, VecDeque};

/// The driver's lines kept per GPU, and without a GPU, to explain a failure.
const WORDS_PER_GPU: usize = 24;
/// Limit of failed probes, and of boundaries, kept.
const MARKS: usize = 64;
/// Tolerated difference between the times of a line and of a step.
const SLACK_NS: u64 = 5_000_000;
/// Limit of lines that are shown without being a GPU's for sure.
const NEARBY: usize = 3;

/// A line, with its number and time in the log.
#[derive(Clone, Debug)]
struct Line {
    seq: u64,
    at_us: u64,
    text: String,
}

/// A line that divides others.
#[derive(Clone, Debug)]
struct Mark<T> {
    seq: u64,
    at_us: u64,
    what: T,
}

/// All lines logged by the driver.
#[derive(Default)]
pub struct DriverLines {
    by_gpu: HashMap<String, VecDeque<Line>>,
    /// The kernel's own lines about failed probes, by GPU.
    failed_probes: VecDeque<Mark<String>>,
    boundaries: VecDeque<Mark<Boundary>>,
    /// Current CLOCK_BOOTTIME minus the log's clock; lookups are for recent lines.
    pub offset_ns: i64,
    /// Facts that the log states of the driver and its fabric.
    pub facts: Facts,
}

/// Lines without a GPU that can explain the failure of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unnamed {
    Never,
    /// All of the load: it has failed itself.
    OfTheLoad,
    /// Lines until the kernel's own about the GPU's probe: other probes ran at the same time.
    OfConcurrentProbes,
    /// Lines between the kernel's own about the probe before and about the GPU's: a load's probes
    /// run one after another.
    OfSerialProbes,
    /// Lines of an initialisation that was over at `until_ns` (CLOCK_BOOTTIME).
    OfInitialisation {
        until_ns: u64,
        whose: Whose,
    },
}

/// GPUs that may have logged a line without an address during an initialisation. `number`: the
/// resource manager's for this GPU (see [`driver_log::rm_number`]), where it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Nothing else was being initialised: all lines are this GPU's.
    Alone { number: Option<u32> },
    /// Others were, and the driver runs one after another: lines since the last boundary are.
    OneByOne { number: Option<u32> },
    /// Others were, at the same time: only lines with the number are.
    Together { number: Option<u32> },
}

/// Lines of the driver about a failure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Words {
    /// Lines with the GPU's address.
    pub named: Vec<String>,
    /// These, and the lines without an address that are this GPU's, in the log's order.
    pub own: Vec<String>,
    /// Further lines without an address, at that time.
    pub nearby: Vec<String>,
    /// Whether the lines without an address in `own` are this GPU's by the order of
    /// initialisations.
    pub by_order: bool,
}

impl DriverLines {
    /// Takes a line that the driver, or the kernel, logged about this GPU, or without one.
    pub fn add(&mut self, gpu: Option<PciAddress>, seq: u64, at_us: u64, text: &str) {
        if let Some(what) = driver_log::boundary(text) {
            push(&mut self.boundaries, MARKS, Mark { seq, at_us, what });
        }
        if let Some(gpu) = gpu.filter(|_| driver_log::is_failed_probe(text)) {
            let what = key_of(Some(gpu));
            push(&mut self.failed_probes, MARKS, Mark { seq, at_us, what });
        }
        if driver_log::explains(text) {
            let text = text.to_string();
            let lines = self.by_gpu.entry(key_of(gpu)).or_default();
            push(lines, WORDS_PER_GPU, Line { seq, at_us, text });
        }
        self.facts.take_line(text);
    }

    /// Lines that explain the failure of this GPU in a step from `from_ns` (CLOCK_BOOTTIME) on.
    pub fn words(&self, gpu: PciAddress, from_ns: u64, unnamed: Unnamed) -> Words {
        let named: Vec<&Line> = self.since(Some(gpu), from_ns).collect();
        let (of_gpu, nearby, by_order) = match unnamed {
            Unnamed::OfInitialisation { until_ns, whose } => {
                let lines = self.of_initialisation(&named, from_ns, until_ns, whose);
                let (number, all) = match whose {
                    Whose::Alone { number } | Whose::OneByOne { number } => (number, true),
                    Whose::Together { number } => (number, false),
                };
                // A line with another number is another GPU's.
                let is_others = |line: &&Line| {
                    let of = driver_log::rm_number(&line.text);
                    number.is_some() && of.is_some() && of != number
                };
                let is_own = |line: &&Line| {
                    all || number.is_some() && driver_log::rm_number(&line.text) == number
                };
                let (own, nearby): (Vec<&Line>, Vec<&Line>) =
                    lines.filter(|line| !is_others(line)).partition(is_own);
                (own, nearby, !matches!(whose, Whose::Alone { .. }))
            }
            // A probe that logs the address logs it with the cause, unless the probe initialises.
            _ if named
                .iter()
                .any(|line| driver_log::init_code(&line.text).is_none()) =>
            {
                (Vec::new(), Vec::new(), false)
            }
            unnamed => (
                self.of_probe(gpu, from_ns, unnamed).collect(),
                Vec::new(),
                false,
            ),
        };
        let own = merged(&named, &of_gpu);
        let texts = |lines: &[&Line]| lines.iter().map(|line| line.text.clone()).collect();
        Words {
            named: texts(&named),
            own: texts(&own),
            nearby: texts(&nearby),
            by_order,
        }
    }

    /// Whether a time of the log is not before `from_ns` (CLOCK_BOOTTIME).
    fn is_since(&self, at_us: u64, from_ns: u64) -> bool {
        // printk's clock is known to a microsecond, its difference from ours to a little more.
        boottime_of(at_us, self.offset_ns) >= from_ns.saturating_sub(SLACK_NS)
    }

    fn is_until(&self, at_us: u64, until_ns: u64) -> bool {
        boottime_of(at_us, self.offset_ns) <= until_ns.saturating_add(SLACK_NS)
    }

    /// Lines about this GPU, or about no GPU, since `from_ns` (CLOCK_BOOTTIME).
    fn since(&self, gpu: Option<PciAddress>, from_ns: u64) -> impl Iterator<Item = &Line> {
        self.by_gpu
            .get(&key_of(gpu))
            .into_iter()
            .flatten()
            .filter(move |line| self.is_since(line.at_us, from_ns))
    }

    /// Lines that name no GPU and can be about the probe of this one. The kernel's line about a
    /// failed probe comes after all lines that the driver logged in that probe.
    fn of_probe(
        &self,
        gpu: PciAddress,
        from_ns: u64,
        unnamed: Unnamed,
    ) -> impl Iterator<Item = &Line> {
        let (key, probes) = (key_of(Some(gpu)), &self.failed_probes);
        let own = probes
            .iter()
            .rposition(|probe| probe.what == key && self.is_since(probe.at_us, from_ns));
        let seq = |probe: Option<usize>| {
            probe
                .and_then(|probe| probes.get(probe))
                .map(|probe| probe.seq)
        };
        let end = seq(own).unwrap_or(u64::MAX);
        let range = match unnamed {
            Unnamed::Never | Unnamed::OfInitialisation { .. } => None,
            Unnamed::OfTheLoad => Some(0..=u64::MAX),
            Unnamed::OfConcurrentProbes => Some(0..=end),
            Unnamed::OfSerialProbes => {
                Some(seq(own.and_then(|own| own.checked_sub(1))).unwrap_or(0)..=end)
            }
        };
        range.into_iter().flat_map(move |range| {
            self.since(None, from_ns)
                .filter(move |line| range.contains(&line.seq))
        })
    }

    /// Lines that name no GPU between the initialisation's begin, or the boundary after that, and
    /// its code, or else its end.
    fn of_initialisation<'a>(
        &'a self,
        named: &[&Line],
        from_ns: u64,
        until_ns: u64,
        whose: Whose,
    ) -> impl Iterator<Item = &'a Line> {
        let coded = named
            .iter()
            .rev()
            .find(|line| driver_log::init_code(&line.text).is_some())
            .map(|line| line.seq);
        let is_before_end = move |seq: u64, at_us: u64| match coded {
            Some(coded) => seq < coded,
            None => self.is_until(at_us, until_ns),
        };
        let last = |wanted: Boundary| {
            self.boundaries
                .iter()
                .rev()
                .find(|mark| mark.what == wanted && is_before_end(mark.seq, mark.at_us))
                .map_or(0, |mark| mark.seq)
        };
        // Beside others, another one's end divides nothing.
        let failed = match whose {
            Whose::Alone { .. } | Whose::OneByOne { .. } => last(Boundary::Failed),
            Whose::Together { .. } => 0,
        };
        let within = move |after: u64| {
            self.since(None, from_ns)
                .filter(move |line| line.seq > after && is_before_end(line.seq, line.at_us))
        };
        // An initialisation can fail before its mark, which is then an earlier one's.
        let begun = match whose {
            Whose::OneByOne { .. } => last(Boundary::Begun).max(failed),
            Whose::Alone { .. } | Whose::Together { .. } => failed,
        };
        within(if within(begun).next().is_some() {
            begun
        } else {
            failed
        })
    }
}

impl Words {
    /// Lines that are shown beside a reason that they do not decide, in one text: the first ones,
    /// which are nearest to the cause. None without any.
    pub fn nearby(&self) -> Option<String> {
        let mut shown: Vec<&str> = Vec::new();
        let unnamed = self.own.iter().filter(|line| !self.named.contains(line));
        for line in unnamed.chain(&self.nearby) {
            let is_new = !driver_log::is_consequence(line) && !shown.contains(&line.as_str());
            if is_new && shown.len() < NEARBY {
                shown.push(line);
            }
        }
        (!shown.is_empty()).then(|| shown.join(" | "))
    }
}

/// Two lists in the log's order as one.
fn merged<'a, 'b>(mut first: &'b [&'a Line], mut second: &'b [&'a Line]) -> Vec<&'a Line> {
    let mut all = Vec::new();
    loop {
        let list = match (first.first(), second.first()) {
            (Some(one), Some(other)) if one.seq > other.seq => &mut second,
            (Some(_), _) => &mut first,
            (None, _) => &mut second,
        };
        let Some((line, rest)) = list.split_first() else {
            return all;
        };
        all.push(*line);
        *list = rest;
    }
}

fn push<T>(list: &mut VecDeque<T>, most: usize, item: T) {
    list.push_back(item);
    if list.len() > most {
        list.pop_front();
    }
}

/// CLOCK_BOOTTIME in ns at a time of the log.
pub fn boottime_of(printk_us: u64, offset_ns: i64) -> u64 {
    let printk_ns = i64::try_from(printk_us).unwrap_or(0).saturating_mul(1000);
    u64::try_from(printk_ns.saturating_add(offset_ns)).unwrap_or(0)
}

/// Lines name a GPU with or without its function (`GPU 0000:01:00.0`, `PCI:0000:01:00`): compare
/// without.
fn key_of(gpu: Option<PciAddress>) -> String {
    gpu.map_or(String::new(), |g| without_function(&g.to_string()))
}

fn without_function(address: &str) -> String {
    address.split('.').next().unwrap_or(address).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const CC: &str = "NVRM: GPU0 confComputeConstructEngine_IMPL: CPU does not support \
        confidential compute.";
    const ASSERT: &str = "NVRM: GPU0 nvAssertFailedNoLog: Assertion failed: 0 @ conf_compute.c:161";
    const FSP: &str = "NVRM: GPU1 kfspPollForResponse_IMPL: FSP command timed out";

    fn gpu(slot: u8) -> PciAddress {
        format!("0001:00:0{slot}.0").parse().unwrap()
    }

    fn coded(slot: u8) -> String {
        format!("NVRM: GPU 0001:00:0{slot}.0: RmInitAdapter failed! (0x22:0x38:878)")
    }

    /// Lines at these times in ms, in this order; the first character of a line with an address is
    /// its slot.
    fn log(lines: &[(u64, Option<u8>, &str)]) -> DriverLines {
        let mut log = DriverLines::default();
        for (seq, (ms, slot, text)) in (1..).zip(lines) {
            log.add(slot.map(gpu), seq, ms * 1000, text);
        }
        log
    }

    fn words(log: &DriverLines, slot: u8, (from, until): (u64, u64), whose: Whose) -> Words {
        let until_ns = until * MS;
        let unnamed = Unnamed::OfInitialisation { until_ns, whose };
        log.words(gpu(slot), from * MS, unnamed)
    }

    const ALONE: Whose = Whose::Alone { number: None };
    const ONE_BY_ONE: Whose = Whose::OneByOne { number: None };
    const TOGETHER: Whose = Whose::Together { number: None };

    #[test]
    fn a_line_without_a_gpu_is_of_the_probe_that_failed_next() {
        let irq = "NVRM: Can't find an IRQ for your NVIDIA card!";
        let failed = |slot| {
            format!("nvidia 0001:00:0{slot}.0: probe with driver nvidia failed with error -1")
        };
        let (third, fourth, fifth) = (failed(3), failed(4), failed(5));
        // A silent probe, one without an interrupt, a silent one; of the last one the kernel says
        // nothing.
        let log = log(&[
            (10, Some(3), &third),
            (20, None, irq),
            (30, Some(4), &fourth),
            (40, Some(5), &fifth),
        ]);
        let of = |slot, unnamed| log.words(gpu(slot), 0, unnamed).own.len();
        assert_eq!(
            [3, 4, 5, 6].map(|slot| of(slot, Unnamed::OfSerialProbes)),
            [0, 1, 0, 1]
        );
        // Probes beside each other may log before or after another one's end.
        assert_eq!(
            [3, 4, 5, 6].map(|slot| of(slot, Unnamed::OfConcurrentProbes)),
            [0, 1, 1, 1]
        );
        assert_eq!(
            [3, 4, 5, 6].map(|slot| of(slot, Unnamed::OfTheLoad)),
            [1; 4]
        );
        assert_eq!(of(4, Unnamed::Never), 0);
    }

    #[test]
    fn lines_without_an_address_explain_the_only_initialisation() {
        let code = coded(3);
        let log = log(&[
            (90, None, "NVRM: GPU0 early: of an initialisation before"),
            (100, None, CC),
            (100, None, ASSERT),
            (101, Some(3), &code),
            (102, None, "NVRM: GPU0 late: of the next one"),
        ]);
        let words = words(&log, 3, (99, 101), ALONE);
        assert_eq!(words.named, std::slice::from_ref(&code));
        assert_eq!(words.own, [CC, ASSERT, &code]);
        assert_eq!(
            (words.nearby().as_deref(), words.by_order),
            (Some(CC), false)
        );
    }

    #[test]
    fn another_initialisations_end_is_where_the_next_ones_lines_begin() {
        let (third, fourth) = (coded(3), coded(4));
        let other = "NVRM: GPU 0001:00:03.0: rm_init_adapter failed, device minor number 0";
        // One after another, a moment apart: the clocks cannot tell them apart.
        let log = log(&[
            (100, None, FSP),
            (100, Some(3), &third),
            (100, Some(3), other),
            (101, None, CC),
            (101, Some(4), &fourth),
        ]);
        assert_eq!(words(&log, 3, (99, 100), ALONE).own, [FSP, &third]);
        assert_eq!(words(&log, 4, (101, 102), ALONE).own, [CC, &fourth]);
        // All opened together, and carried out one after another.
        assert_eq!(words(&log, 3, (99, 102), ONE_BY_ONE).own, [FSP, &third]);
        let fourths = words(&log, 4, (99, 102), ONE_BY_ONE);
        assert_eq!(
            (fourths.own, fourths.by_order),
            (vec![CC.into(), fourth], true)
        );
    }

    #[test]
    fn a_mark_divides_initialisations_unless_nothing_follows_it() {
        let mark = "NVRM: GPU0 kgmmuClear: FBHUB Interrupt detected. Clearing it.";
        let code = coded(4);
        let early = "NVRM: GPU0 early: something of an initialisation that succeeded";
        let first = log(&[
            (100, None, early),
            (110, None, mark),
            (120, None, CC),
            (130, Some(4), &code),
        ]);
        assert_eq!(words(&first, 4, (90, 130), ONE_BY_ONE).own, [CC, &code]);
        let second = log(&[
            (100, None, mark),
            (110, None, CC),
            (120, None, mark),
            (130, Some(4), &code),
        ]);
        assert_eq!(words(&second, 4, (90, 130), ONE_BY_ONE).own, [CC, &code]);
    }

    #[test]
    fn beside_others_only_the_number_tells_whose_a_line_is() {
        let (third, fourth) = (coded(3), coded(4));
        let log = log(&[
            (100, None, CC),
            (101, None, "NVRM: osInitNvMapping: no number"),
            (102, None, FSP),
            (103, Some(3), &third),
            (104, Some(4), &fourth),
        ]);
        let unknown = words(&log, 4, (99, 104), TOGETHER);
        assert_eq!(unknown.own, std::slice::from_ref(&fourth));
        assert_eq!(unknown.nearby.len(), 3);
        assert_eq!(unknown.nearby().unwrap().split(" | ").next(), Some(CC));
        let known = words(&log, 4, (99, 104), Whose::Together { number: Some(1) });
        assert_eq!(known.own, [FSP, &fourth]);
        assert_eq!(known.nearby, ["NVRM: osInitNvMapping: no number"]);
        assert!(known.by_order);
        // A GPU that is up logs, too.
        let alone = words(&log, 3, (99, 104), Whose::Alone { number: Some(1) });
        assert_eq!(alone.own, ["NVRM: osInitNvMapping: no number", FSP, &third]);
    }

    #[test]
    fn what_is_shown_is_the_nearest_to_the_cause_and_bounded() {
        let nearby = (0..9).map(|n| format!("NVRM: GPU0 f: {}", n / 2)).collect();
        let words = Words {
            nearby,
            ..Words::default()
        };
        assert_eq!(
            words.nearby().as_deref(),
            Some("NVRM: GPU0 f: 0 | NVRM: GPU0 f: 1 | NVRM: GPU0 f: 2")
        );
        assert_eq!(Words::default().nearby(), None);
    }

    #[test]
    fn a_program_that_crashes_in_a_loop_pushes_nothing_out() {
        let mut log = log(&[(100, None, CC)]);
        for seq in 2..200 {
            let crash = "nvidia-smi[9]: segfault at 0 ip 0 sp 0 error 4 in libnvidia-ml.so.1[1+1]";
            log.add(None, seq, 101_000, crash);
        }
        assert_eq!(words(&log, 3, (99, 110), ALONE).own, [CC]);
    }
}
