//! A failure means that the collector, run by its unit, mixes up the boots of two guests under KVM:
//! records are lost with a killed collector or guest, or a guest speaks for another's boot or pod.

use super::service;
use crate::vm::harness::{
    BOOTS, EmulatedHost, Guest, KvmGuest, KvmImage, Outcome, Size, TestContext, VmTest, complete,
};
use anyhow::{Context, Result, bail, ensure};
use kata_gpu_report::data::boot_file::{BootFile, HostEvent};
use kata_gpu_report::data::clock_offset::{Clock, Wall};
use kata_gpu_test_guest::halves::liar;
use kata_gpu_wire::decode::decode;
use kata_gpu_wire::names;
use kata_gpu_wire::record::{Kind, Line, Record};

pub const TESTS: &[VmTest] = &[VmTest {
    name: "emulated_host_keeps_its_guests_boots_apart_by_cid",
    run: kept_apart,
}];

pub(in crate::vm) const SERVICE: &str = "kata-gpu-boot.service";

/// A boot as its file has it.
pub(in crate::vm) struct Boot {
    pub id: String,
    pub file: BootFile,
    /// Records in the order of the file; a record that was written twice is here twice.
    records: Vec<Record>,
}

impl Boot {
    pub fn read(host: &mut EmulatedHost, id: &str) -> Result<Self> {
        let text = host.run(&format!("cat {BOOTS}/{id}.ndjson"))?;
        let file = BootFile::read(text.as_bytes())?;
        ensure!(
            file.damaged == 0,
            "boot {id}: damaged lines: {:?}",
            file.damage
        );
        let records = text
            .lines()
            .filter_map(|line| match decode(line.as_bytes()) {
                Ok(Line::Record(record)) => Some(*record),
                _ => None,
            });
        Ok(Self {
            id: id.into(),
            records: records.collect(),
            file,
        })
    }

    /// All boots that a peer has sent.
    fn of(host: &mut EmulatedHost, guest: &KvmGuest) -> Result<Vec<Self>> {
        let pattern = format!("\"event\":\"connected\",\"peer\":\"{}\"", guest.peer());
        let files = host.run(&format!(
            "cd {BOOTS} && (grep -lF '{pattern}' *.ndjson || true)"
        ))?;
        files
            .lines()
            .filter_map(|name| name.strip_suffix(".ndjson"))
            .map(|id| Self::read(host, id))
            .collect()
    }

    /// The boot of a guest that has sent one.
    pub fn only(host: &mut EmulatedHost, guest: &KvmGuest) -> Result<Self> {
        let mut boots = Self::of(host, guest)?;
        ensure!(
            boots.len() == 1,
            "{} has sent {} boots",
            guest.peer(),
            boots.len()
        );
        boots.pop().context("no boot")
    }

    /// The host's clock at the first such record, by the pings of this boot: a guest's own clock of
    /// the wall can be 0.3 s off.
    pub fn wall(&self, what: &str, wanted: impl Fn(&Record) -> bool) -> Result<Wall> {
        let record = self
            .records
            .iter()
            .find(|r| wanted(r))
            .with_context(|| format!("boot {} has no {what}", self.id))?;
        Clock::of(self.file.clock_samples())
            .wall_at(record.boottime_ns)
            .with_context(|| format!("boot {} has no pings", self.id))
    }

    fn pod(&self) -> Option<&str> {
        self.file.sandbox()?.pod.as_deref()
    }

    /// Peer of each connection that this boot came over.
    fn peers(&self) -> Vec<&str> {
        let connected = self.file.host.iter().filter_map(|line| match &line.event {
            HostEvent::Connected { peer, .. } => Some(peer.as_str()),
            _ => None,
        });
        connected.collect()
    }

    fn has_settled(&self) -> bool {
        self.records.iter().any(|r| r.name == names::SETTLED)
    }

    /// Every record once, none made up, and nobody else's word.
    fn is_whole(&self, guest: &KvmGuest, pod: &str) -> Result<()> {
        complete(&self.records).with_context(|| format!("boot {}", self.id))?;
        ensure!(
            self.records.iter().all(|r| r.name != liar::FORGED),
            "boot {} has a record that another guest made up",
            self.id
        );
        ensure!(
            self.peers().iter().all(|peer| *peer == guest.peer()),
            "boot {}: {:?} spoke for it",
            self.id,
            self.peers()
        );
        ensure!(
            self.pod() == Some(pod),
            "boot {} is said to be of pod {:?}, not {pod}",
            self.id,
            self.pod()
        );
        Ok(())
    }

    /// Seconds since the kernel began, of the first such record.
    fn seconds(&self, name: &str) -> Option<f64> {
        let record = self
            .records
            .iter()
            .find(|r| r.name == name && r.kind != Kind::End)?;
        Some(record.boottime_ns as f64 / 1e9)
    }

    /// The figures of a boot, for people: nothing is asserted of them.
    fn figures(&self) -> String {
        let start = self.seconds(names::INIT_START).unwrap_or(f64::NAN);
        let after = |name| {
            self.seconds(name)
                .map_or("-".into(), |at| format!("{:.0}", (at - start) * 1e3))
        };
        let ping = self
            .file
            .clock_samples()
            .map(|s| s.error_ns)
            .min()
            .unwrap_or_default();
        format!(
            "kernel {start:.1} s, then in ms agent exec {}, first publication {}, settled {}, \
            ping +-{} us",
            after(names::AGENT_EXEC),
            after(names::GPU_PUBLISHED),
            after(names::SETTLED),
            ping / 1000
        )
    }
}

/// Waits until a file that a guest has sent to has this text.
pub(in crate::vm) fn sent(host: &mut EmulatedHost, guest: &KvmGuest, text: &str) -> Result<()> {
    let peer = guest.peer();
    let look = format!(
        "cd {BOOTS} && files=$(grep -lF '\"peer\":\"{peer}\"' *.ndjson) && grep -qF '{text}' $files"
    );
    host.until(&format!("{text:?} of {peer}"), &look).map(drop)
}

pub(in crate::vm) fn event(name: &str) -> String {
    format!("\"kind\":\"event\",\"name\":\"{name}\"")
}

fn kept_apart(context: &TestContext) -> Result<Outcome> {
    if let Some(skipped) = EmulatedHost::skipped(context)? {
        return Ok(skipped);
    }
    let image = KvmImage::make(context, Guest::new().cpus(1).append("fakepci.gpus=2"))?;
    let mut host = service::start(context, Size::WITH_GUESTS, &image.files())?;
    KvmGuest::prepare(&mut host)?;
    host.run(&format!("systemctl start {SERVICE}"))?;

    // Its GPUs take longer to initialise than the test takes.
    let victim = KvmGuest::start(
        &mut host,
        &image,
        "0a1b",
        "train-0",
        33,
        "nvidia.s2_ms=3600000",
    )?;
    sent(&mut host, &victim, &event(names::GPU_PUBLISHED))?;
    let before = Boot::only(&mut host, &victim)?;
    let figures = before.figures();

    // While one streams and another boots the collector dies, as if killed for its memory.
    let words = format!("testagent.guest=liar testagent.victim={}", before.id);
    let liar = KvmGuest::start(&mut host, &image, "2c3d", "train-1", 34, &words)?;
    host.run(&format!("systemctl kill --signal=KILL {SERVICE}"))?;
    host.until(
        "the guest again",
        &format!(
            "test $(grep -cF '\"event\":\"connected\"' {BOOTS}/{}.ndjson) -ge 2",
            before.id
        ),
    )?;
    sent(&mut host, &liar, &event(names::SETTLED))?;
    liar.wait_lines(&mut host, 1, &format!("\"msg\":\"{}\"", liar::MESSAGE))?;
    let console = liar.console(&mut host)?;
    for verdict in ["\"stolen\":\"refused\"", "\"free\":\"accepted\""] {
        ensure!(
            console.contains(verdict),
            "no {verdict} on the console of the guest that lies: {console}"
        );
    }

    // Amid its boot one ends.
    victim.kill(&mut host)?;
    host.until(
        "its end",
        &format!(
            "tail -n 3 {BOOTS}/{}.ndjson | grep -qF '\"event\":\"disconnected\"'",
            before.id
        ),
    )?;
    let closed = Boot::read(&mut host, &before.id)?;
    closed.is_whole(&victim, "train-0")?;
    ensure!(
        closed.records.starts_with(&before.records),
        "records that were there are gone"
    );
    // Records about the lost connection came over the next one.
    ensure!(
        closed.records.len() > before.records.len() && closed.peers().len() >= 2,
        "it was never connected again: {:?}",
        closed.peers()
    );
    ensure!(
        !closed.has_settled(),
        "a boot that was killed amid its way is said to have settled"
    );

    // The other one is as it was, and what it lied is its own.
    let (free, own): (Vec<_>, Vec<_>) = Boot::of(&mut host, &liar)?
        .into_iter()
        .partition(|boot| boot.id == liar::FREE);
    let ([free], [own]) = (&free[..], &own[..]) else {
        bail!(
            "the guest that lies has {} boots and {} free ones",
            own.len(),
            free.len()
        )
    };
    ensure!(
        free.records.iter().any(|r| r.name == liar::FORGED),
        "the control has no record that was made up"
    );
    ensure!(
        free.pod() == Some("train-1"),
        "what a guest says names its pod: {:?}",
        free.pod()
    );
    own.is_whole(&liar, "train-1")?;
    ensure!(own.has_settled(), "the guest that lies has not settled");
    let journal = host.run(&format!("journalctl -b -o cat -u {SERVICE}"))?;
    for said in [
        format!(
            "{} claims a boot that belongs to {}: refused",
            liar.peer(),
            victim.peer()
        ),
        format!(
            "{}: claimed boot {} and now claims {}",
            liar.peer(),
            liar::FREE,
            closed.id
        ),
    ] {
        ensure!(
            journal.contains(&said),
            "the collector has not said {said:?}: {journal}"
        );
    }
    Ok(Outcome::Measured(format!(
        "under KVM: {figures}; beside another: {}",
        own.figures()
    )))
}
