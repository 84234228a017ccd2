//! The only writer of the CDI specs. Tasks of GPUs send reports; each report, or each group of
//! reports that came meanwhile, is one publication. The writer waits neither for other GPUs nor for
//! the lane.

use super::roster::Roster;
use super::schedule_messages::GpuId;
use super::slots::Listed;
use crate::cdi::publish::{DIRECTORY, Publisher};
use crate::cdi::schema::Spec;
use crate::cdi::spec::{Device, Entry, Extras, Options, Ready, generate};
use crate::driver_files::DriverFiles;
use crate::gpu::device_nodes::Node;
use crate::gpu::driver_caps::MigInstance;
use crate::step;
use crate::stream::{After, StepId};
use kata_gpu_wire::failure::Reason;
use kata_gpu_wire::names;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// Pause between a publication that failed and the next try.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// A change of the spec.
pub enum Update {
    /// GPUs came or went; the roster lists the present ones.
    Roster,
    /// Nodes and files that every container with a GPU gets.
    Common(Common),
    /// The node of a GPU exists, and containers can get it unless the GPU is held back; `after` is
    /// the step that made it ready.
    Ready {
        gpu: GpuId,
        nodes: Vec<Node>,
        after: Option<StepId>,
    },
    /// Whether a GPU is held back: it stays declared, whatever it is; `after` is the wait before.
    HeldBack {
        gpu: GpuId,
        held: bool,
        after: Option<StepId>,
    },
    /// Whether GPUs without a node of their own so far are held back.
    HeldByDefault(bool),
    /// Devices of a usable GPU besides its own node.
    Extras { gpu: GpuId, extras: Extras },
    /// Devices of another kind, with a file of its own named after `mode`.
    Other { mode: &'static str, spec: Spec },
    /// A usable GPU is also known by this name.
    Known { gpu: GpuId, uuid: String },
    /// MIG instances of a usable GPU are also known by these names.
    KnownInstances {
        gpu: GpuId,
        uuids: BTreeMap<MigInstance, String>,
    },
    /// A GPU has failed, for this reason as far as it is known.
    Failed { gpu: GpuId, reason: Option<Reason> },
    /// All GPUs are usable or failed.
    Settled,
}

/// Channel to the writer. Sending fails only when the writer is gone, with the runtime.
pub type Updates = mpsc::UnboundedSender<Update>;

/// Nodes and files that every container with a GPU gets, as far as they exist.
#[derive(Default)]
pub struct Common {
    pub nodes: Vec<Node>,
    pub files: Option<DriverFiles>,
}

/// Entries published by an earlier worker.
#[derive(Default)]
pub struct Published {
    /// Those that still hold.
    pub entries: HashMap<GpuId, Entry>,
    /// GPUs to which its file leads, with those that have left since.
    pub listed: BTreeSet<GpuId>,
    pub common: Common,
}

/// Starts the writer; must be called inside the runtime. Before this returns, the spec with every
/// GPU of the roster is written, unless `withheld` until [`Update::Settled`]. `hold`: GPUs are held
/// back until an [`Update::HeldBack`] releases them, except those already published. Each GPU whose
/// report is done is passed to `done`, with whether it is held back.
pub fn start(
    roster: Arc<Roster>,
    published: Published,
    options: Options,
    withheld: bool,
    hold: bool,
    done: impl Fn(GpuId, bool) + Send + 'static,
) -> Updates {
    let (sender, mut updates) = mpsc::unbounded_channel();
    let directory = PathBuf::from(DIRECTORY);
    let given = published.entries.keys().map(|gpu| (*gpu, false)).collect();
    let mut publication = Publication {
        roster,
        hold: Hold {
            by_default: hold,
            of: given,
        },
        entries: published.entries,
        common: published.common,
        others: Vec::new(),
        options,
        withheld,
        directory,
        listed: published.listed,
        unwritten: Unwritten::default(),
    };
    publication.publish();
    tokio::spawn(async move {
        let mut updates_now = Vec::new();
        loop {
            let retry = async {
                match publication.is_written() {
                    true => std::future::pending().await,
                    // Not on the boot path: after a failure.
                    false => tokio::time::sleep(RETRY_AFTER).await,
                }
            };
            tokio::select! {
                count = updates.recv_many(&mut updates_now, 64) => match count {
                    0 => return,
                    _ => publication.apply(std::mem::take(&mut updates_now)),
                },
                () = retry => publication.retry(),
            }
            .into_iter()
            .for_each(|gpu| done(gpu, publication.hold.holds(gpu)));
        }
    });
    sender
}

/// GPUs that stay declared although their nodes exist.
#[derive(Default)]
struct Hold {
    by_default: bool,
    of: HashMap<GpuId, bool>,
}

impl Hold {
    fn holds(&self, gpu: GpuId) -> bool {
        self.of.get(&gpu).copied().unwrap_or(self.by_default)
    }
}

struct Publication {
    roster: Arc<Roster>,
    hold: Hold,
    /// Entries that are not pending, of GPUs that are held back as well.
    entries: HashMap<GpuId, Entry>,
    common: Common,
    /// Specs of other kinds that are not written yet.
    others: Vec<(&'static str, Spec)>,
    options: Options,
    withheld: bool,
    directory: PathBuf,
    /// GPUs to which the published file leads.
    listed: BTreeSet<GpuId>,
    unwritten: Unwritten,
}

/// Contents of a publication that failed, kept for the next try.
#[derive(Default)]
struct Unwritten {
    /// The spec could not be written.
    spec: bool,
    /// GPUs that it makes resolvable, and steps that it comes after.
    ready: Vec<GpuId>,
    after: After,
    /// GPUs whose report waits for it.
    reported: Vec<GpuId>,
    /// The error was reported.
    is_reported: bool,
}

/// Changes by one group of reports.
#[derive(Default)]
struct Changes {
    /// The spec is another one.
    spec: bool,
    /// GPUs that containers could get, and cannot any more.
    held_again: Vec<GpuId>,
    /// GPUs with other extras, and their numbers of displays and instances.
    extras: Vec<(GpuId, usize, usize)>,
}

impl Publication {
    /// Whether nothing is left to be written.
    fn is_written(&self) -> bool {
        !self.unwritten.spec && (self.withheld || self.others.is_empty())
    }

    /// Repeats failed writes; returns the GPUs whose report is done by them.
    fn retry(&mut self) -> Vec<GpuId> {
        if self.unwritten.spec {
            self.publish();
        }
        self.publish_others();
        self.reported()
    }

    /// GPUs whose report is done.
    fn reported(&mut self) -> Vec<GpuId> {
        if self.unwritten.spec {
            Vec::new()
        } else {
            std::mem::take(&mut self.unwritten.reported)
        }
    }

    /// Takes reports in; returns the GPUs whose report needs no further publication.
    fn apply(&mut self, updates: Vec<Update>) -> Vec<GpuId> {
        let mut changes = Changes::default();
        for update in updates {
            self.take(update, &mut changes);
        }
        if changes.spec {
            self.publish();
        }
        self.report(&changes);
        self.publish_others();
        self.reported()
    }

    fn take(&mut self, update: Update, changes: &mut Changes) {
        match update {
            Update::Roster => {
                self.entries.retain(|gpu, _| self.roster.contains(*gpu));
                self.hold.of.retain(|gpu, _| self.roster.contains(*gpu));
                changes.spec = true;
            }
            // Common nodes are of no use before a GPU is ready: no publication of their own.
            Update::Common(common) => self.common = common,
            Update::Ready { gpu, nodes, after } => {
                self.unwritten.reported.push(gpu);
                let entry = Entry::Ready(Ready {
                    nodes,
                    ..Ready::default()
                });
                if self.set(gpu, entry) && !self.hold.holds(gpu) {
                    self.make_resolvable(gpu, after);
                    changes.spec = true;
                }
            }
            Update::HeldByDefault(held) => {
                for gpu in self.entries.keys() {
                    self.hold.of.entry(*gpu).or_insert(self.hold.by_default);
                }
                self.hold.by_default = held;
            }
            Update::HeldBack { gpu, held, after } => self.hold_back(gpu, held, after, changes),
            Update::Extras { gpu, extras } => {
                if let Some(ready) = self.ready(gpu)
                    && ready.extras != extras
                {
                    let instances = extras.instances.iter().filter(|i| i.nodes.is_some());
                    let counts = (gpu, extras.displays.len(), instances.count());
                    ready.extras = extras;
                    changes.extras.push(counts);
                    changes.spec = true;
                }
            }
            Update::Other { mode, spec } => {
                self.others.retain(|(other, _)| *other != mode);
                self.others.push((mode, spec));
            }
            Update::Known { gpu, uuid } => {
                if let Some(ready) = self.ready(gpu) {
                    ready.uuid = Some(uuid);
                    changes.spec = true;
                }
            }
            Update::KnownInstances { gpu, uuids } => {
                if let Some(ready) = self.ready(gpu)
                    && ready.instance_uuids != uuids
                {
                    ready.instance_uuids = uuids;
                    changes.spec = true;
                }
            }
            Update::Failed { gpu, reason } => {
                changes.spec |= self.set(gpu, Entry::Failed(reason));
                self.unwritten.ready.retain(|r| *r != gpu);
            }
            Update::Settled => {
                if self.withheld {
                    self.end_withholding();
                    changes.spec = true;
                }
            }
        }
    }

    /// Lets the next publication report a GPU as resolvable; `after` is the step before.
    fn make_resolvable(&mut self, gpu: GpuId, after: Option<StepId>) {
        self.unwritten.ready.push(gpu);
        self.unwritten.after.0.extend(after);
    }

    fn hold_back(&mut self, gpu: GpuId, held: bool, after: Option<StepId>, changes: &mut Changes) {
        let before = self.hold.holds(gpu);
        self.hold.of.insert(gpu, held);
        if before == held || !self.is_ready(gpu) {
            return;
        }
        changes.spec = true;
        if held {
            self.unwritten.ready.retain(|r| *r != gpu);
            changes.held_again.push(gpu);
        } else {
            self.make_resolvable(gpu, after);
        }
    }

    /// The first publication makes all GPUs resolvable that are ready by now.
    fn end_withholding(&mut self) {
        self.withheld = false;
        let is_given = |gpu: &GpuId| self.is_ready(*gpu) && !self.hold.holds(*gpu);
        let mut ready: Vec<GpuId> = self.entries.keys().copied().filter(is_given).collect();
        ready.sort_unstable();
        self.unwritten.ready = ready;
    }

    fn report(&self, changes: &Changes) {
        for gpu in &changes.held_again {
            let reason = "new containers wait for it; those that have it keep it";
            let generation = gpu.again();
            tracing::warn!(name: names::GPU_WITHHELD, gpu = %gpu.address, generation, reason);
        }
        for (gpu, displays, instances) in &changes.extras {
            let index = self.roster.index(gpu.address) as u64;
            let (displays, instances) = (*displays as u64, *instances as u64);
            tracing::info!(
                name: names::CDI_EXTRA_DEVICES,
                gpu = %gpu.address, index, displays, instances
            );
        }
    }

    /// Sets the entry of a GPU; returns whether that changes the spec.
    fn set(&mut self, gpu: GpuId, entry: Entry) -> bool {
        // A GPU that was removed meanwhile stays removed.
        self.roster.contains(gpu) && self.entries.insert(gpu, entry.clone()) != Some(entry)
    }

    /// The entry of a GPU, unless it was given up meanwhile.
    fn ready(&mut self, gpu: GpuId) -> Option<&mut Ready> {
        match self.entries.get_mut(&gpu) {
            Some(Entry::Ready(ready)) => Some(ready),
            _ => None,
        }
    }

    fn is_ready(&self, gpu: GpuId) -> bool {
        matches!(self.entries.get(&gpu), Some(Entry::Ready(_)))
    }

    /// Writes the spec and reports the GPUs that became resolvable by that.
    fn publish(&mut self) {
        let slots = self.roster.all();
        // A name whose GPU has left resolves to nothing until a GPU comes to that address; one that
        // is being reset is waited for.
        let entry = |slot: &Listed| match slot.here {
            true if self.is_ready(slot.gpu) && self.hold.holds(slot.gpu) => Entry::Pending,
            true => self
                .entries
                .get(&slot.gpu)
                .cloned()
                .unwrap_or(Entry::Pending),
            false if self.roster.is_returning(slot.gpu.address) => Entry::Pending,
            false => Entry::Absent,
        };
        let devices: Vec<Device> = slots
            .iter()
            .map(|slot| Device {
                index: slot.index,
                address: slot.gpu.address,
                entry: entry(slot),
            })
            .collect();
        let publisher = Publisher::new(&self.directory);
        if self.withheld
            || devices.is_empty() && !publisher.as_ref().is_ok_and(Publisher::is_published)
        {
            // A guest that never had a GPU does not publish the kind.
            self.unwritten.spec = false;
            return;
        }
        let is_listed = |slot: &Listed| matches!(entry(slot), Entry::Ready(_));
        let listed: BTreeSet<GpuId> = slots
            .iter()
            .filter(|slot| is_listed(slot))
            .map(|slot| slot.gpu)
            .collect();
        let count =
            |wanted: fn(&Entry) -> bool| devices.iter().filter(|d| wanted(&d.entry)).count() as u64;
        let empty = tracing::field::Empty;
        let spec = generate(
            &devices,
            &self.common.nodes,
            self.common.files.as_ref(),
            &self.options,
        );
        let write = || {
            publisher
                .as_ref()
                .map_err(ToString::to_string)?
                .publish(&spec)
                .map_err(|error| error.to_string())
        };
        // A failure is reported once, and the publication that ends it.
        let again = self.unwritten.spec.then(write);
        if matches!(again, Some(Err(_))) {
            self.withdraw_stale(&listed);
            return;
        }
        let after = std::mem::take(&mut self.unwritten.after);
        let step = step!(
            names::CDI_PUBLISH, after = ?after, ready = empty, pending = empty, failed = empty,
            bytes = empty,
        );
        step.note("ready", count(|e| matches!(e, Entry::Ready(_))));
        step.note("pending", count(|e| *e == Entry::Pending));
        step.note(
            "failed",
            count(|e| matches!(e, Entry::Failed(_) | Entry::Absent)),
        );
        match again.unwrap_or_else(write) {
            Ok(bytes) => step.note("bytes", bytes as u64),
            Err(error) => {
                step.fail(&format!(
                    "{error}: trying again every {RETRY_AFTER:?}; containers wait meanwhile, \
                        until the agent's cdi_timeout"
                ));
                self.withdraw_stale(&listed);
                (self.unwritten.spec, self.unwritten.after) = (true, after);
                return;
            }
        }
        drop(step);
        self.unwritten.spec = false;
        self.listed = listed;
        let newly_ready = std::mem::take(&mut self.unwritten.ready);
        for Listed { gpu, index, .. } in slots
            .into_iter()
            .filter(|slot| newly_ready.contains(&slot.gpu))
        {
            tracing::info!(
                name: names::GPU_PUBLISHED, gpu = %gpu.address, index = index as u64,
                generation = gpu.again(),
            );
        }
    }

    /// Removes a spec that cannot be replaced and leads to a GPU to which its successor, with
    /// `listed`, would not: that GPU is gone (another one may have its minor soon), has failed, or
    /// is held back. Containers wait for a kind that is absent.
    fn withdraw_stale(&mut self, listed: &BTreeSet<GpuId>) {
        if !self.listed.is_subset(listed)
            && Publisher::new(&self.directory)
                .and_then(|publisher| publisher.withdraw())
                .is_ok()
        {
            self.listed.clear();
        }
    }

    /// Writes the specs of other kinds; those that cannot be written stay for another try.
    fn publish_others(&mut self) {
        if !self.withheld {
            let is_reported = self.unwritten.is_reported;
            let failed = std::mem::take(&mut self.others)
                .into_iter()
                .filter(|(mode, spec)| !publish_other(&self.directory, mode, spec, is_reported));
            self.others = failed.collect();
            self.unwritten.is_reported = !self.others.is_empty();
        }
    }
}

/// Writes the spec of another kind; returns whether that went well.
fn publish_other(directory: &Path, mode: &str, spec: &Spec, is_reported: bool) -> bool {
    let file = format!("nvidia-{mode}.yaml");
    let written = Publisher::new(directory).and_then(|p| p.publish_as(&file, spec));
    let (kind, devices) = (spec.kind.as_str(), spec.devices.len() as u64);
    match &written {
        Ok(bytes) => {
            tracing::info!(name: names::CDI_EXTRA_DEVICES, kind, devices, bytes = *bytes as u64)
        }
        Err(error) if !is_reported => {
            let error = format!(
                "{error}: trying again every {RETRY_AFTER:?}; containers that ask for {kind} wait \
                    meanwhile, until the agent's cdi_timeout"
            );
            tracing::error!(name: names::CDI_EXTRA_DEVICES, kind, error);
        }
        Err(_) => {}
    }
    written.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cdi::schema::Edits;
    use crate::cdi::spec::Instance;
    use crate::config::Naming;
    use crate::gpu::bind::{Bound, Sight};
    use kata_gpu_test_support::temp_dir;

    fn publication(directory: &Path) -> (Publication, GpuId) {
        let (roster, address) = (Roster::default(), "0001:00:03.0".parse().unwrap());
        roster.observe(
            address,
            Sight {
                device: Some(7),
                bind: None,
            },
            Some(0x2330),
        );
        let gpu = GpuId {
            address,
            generation: 0,
        };
        let (entries, common, options) = (HashMap::new(), Common::default(), Options::default());
        let (directory, unwritten, roster) = (
            directory.to_path_buf(),
            Unwritten::default(),
            Arc::new(roster),
        );
        let (hold, others, listed) = (Hold::default(), Vec::new(), BTreeSet::new());
        (
            Publication {
                roster,
                hold,
                entries,
                common,
                others,
                options,
                withheld: false,
                directory,
                listed,
                unwritten,
            },
            gpu,
        )
    }

    fn ready(gpu: GpuId, minor: u32) -> Update {
        let node = Node {
            path: format!("/dev/nvidia{minor}").into(),
            major: 195,
            minor,
            mode: 0o666,
            gid: 0,
        };
        Update::Ready {
            gpu,
            nodes: vec![node],
            after: None,
        }
    }

    #[test]
    fn what_cannot_be_written_is_written_later_and_reported_then() {
        let folder = temp_dir();
        let base = folder.path();
        // A file is in the directory's place.
        let directory = base.join("cdi");
        std::fs::write(&directory, "").unwrap();
        let (mut publication, gpu) = publication(&directory);
        let other = Update::Other {
            mode: "imex",
            spec: Spec::new("nvidia.com/imex-channel", Vec::new(), Edits::default()),
        };
        assert_eq!(
            publication.apply(vec![ready(gpu, 3), other]),
            [],
            "not published yet"
        );
        assert!(!publication.is_written());
        assert_eq!(publication.apply(vec![Update::Settled]), []);
        assert_eq!(publication.retry(), []);
        std::fs::remove_file(&directory).unwrap();
        assert_eq!(publication.retry(), [gpu]);
        assert!(publication.is_written() && publication.unwritten.ready.is_empty());
        assert!(
            std::fs::read_to_string(directory.join("nvidia.yaml"))
                .unwrap()
                .contains("/dev/nvidia3")
        );
        assert!(directory.join("nvidia-imex.yaml").exists());
    }

    #[test]
    fn a_spec_that_cannot_be_replaced_does_not_outlive_its_gpu() {
        let lost: [fn(GpuId) -> Update; 2] = [
            |gpu| Update::Failed { gpu, reason: None },
            |gpu| Update::HeldBack {
                gpu,
                held: true,
                after: None,
            },
        ];
        for lost in lost {
            let folder = temp_dir();
            let base = folder.path();
            let (mut publication, gpu) = publication(base);
            let (file, obstacle) = (base.join("nvidia.yaml"), base.join("nvidia.yaml.tmp"));
            assert_eq!(publication.apply(vec![ready(gpu, 3)]), [gpu]);
            std::fs::create_dir(&obstacle).unwrap();
            // The file's list is still true.
            publication.apply(vec![Update::Known {
                gpu,
                uuid: "GPU-0".into(),
            }]);
            assert!(file.exists() && !publication.is_written());
            // The first failure was reported: the next try is one of the same publication.
            publication.apply(vec![lost(gpu)]);
            assert!(!file.exists() && !publication.is_written());
            std::fs::remove_dir(&obstacle).unwrap();
            publication.retry();
            let text = std::fs::read_to_string(&file).unwrap();
            assert!(publication.is_written() && !text.contains("/dev/nvidia3"));
        }
    }

    #[test]
    fn a_gpu_that_is_being_reset_is_waited_for_until_it_stays_away() {
        let folder = temp_dir();
        let (mut publication, gpu) = publication(folder.path());
        let bind = |bind| Sight {
            device: Some(7),
            bind,
        };
        let roster = Arc::clone(&publication.roster);
        roster.observe(gpu.address, bind(Some(1)), None);
        let bound = Bound {
            address: gpu.address,
            device: 7,
            bind: 1,
        };
        assert!(roster.bound(gpu, bound));
        let mut pending = || {
            publication.apply(vec![Update::Roster]);
            let text = std::fs::read_to_string(folder.path().join("nvidia.yaml")).unwrap();
            text.contains("/pending/")
        };
        assert!(pending());
        roster.returns(gpu.address);
        roster.observe(gpu.address, bind(None), None);
        assert!(!roster.contains(gpu) && pending());
        roster.stays_away(gpu.address);
        assert!(!pending());
        // The GPU comes back, and leaves again for another reason.
        roster.returns(gpu.address);
        roster.observe(gpu.address, bind(Some(2)), None);
        let again = roster.at(gpu.address).unwrap();
        assert!(roster.bound(again, Bound { bind: 2, ..bound }) && pending());
        roster.observe(gpu.address, bind(None), None);
        assert!(!pending());
    }

    #[test]
    fn instance_names_are_published_once_and_outlive_displays() {
        let folder = temp_dir();
        let base = folder.path();
        let (mut publication, gpu) = publication(base);
        publication.options.namings = vec![Naming::Index, Naming::Uuid];
        let id = MigInstance {
            gpu: 3,
            gi: 1,
            ci: 0,
        };
        let cap = |n: u32| Node {
            path: format!("/dev/nvidia-caps/nvidia-cap{n}").into(),
            major: 235,
            minor: n,
            mode: 0o444,
            gid: 0,
        };
        let extras = |caps: [u32; 2]| {
            let nodes = Some(caps.map(cap));
            Update::Extras {
                gpu,
                extras: Extras {
                    instances: vec![Instance { id, nodes }],
                    ..Extras::default()
                },
            }
        };
        let known = || Update::KnownInstances {
            gpu,
            uuids: BTreeMap::from([(id, "MIG-1".to_string())]),
        };
        let spec = || std::fs::read_to_string(base.join("nvidia.yaml")).unwrap();
        publication.apply(vec![ready(gpu, 3), extras([12, 14])]);
        assert!(!spec().contains("MIG-1"));
        publication.apply(vec![known()]);
        assert!(spec().contains("MIG-1"), "{}", spec());
        std::fs::remove_file(base.join("nvidia.yaml")).unwrap();
        publication.apply(vec![known()]);
        assert!(
            !base.join("nvidia.yaml").exists(),
            "what is known already is written again"
        );
        publication.apply(vec![extras([12, 13])]);
        assert!(
            spec().contains("MIG-1") && spec().contains("nvidia-cap13"),
            "{}",
            spec()
        );
    }

    #[test]
    fn an_arrival_that_has_ended_changes_nothing_of_the_next_one() {
        let folder = temp_dir();
        let base = folder.path();
        let (mut publication, old) = publication(base);
        publication.apply(vec![ready(old, 3)]);
        publication.roster.observe(
            old.address,
            Sight {
                device: Some(8),
                bind: None,
            },
            Some(0x2330),
        );
        let new = GpuId {
            generation: 1,
            ..old
        };
        publication.apply(vec![
            Update::Roster,
            ready(new, 5),
            ready(old, 3),
            Update::Failed {
                gpu: old,
                reason: None,
            },
        ]);
        let spec = std::fs::read_to_string(base.join("nvidia.yaml")).unwrap();
        assert!(
            spec.contains("/dev/nvidia5") && !spec.contains("/dev/nvidia3"),
            "{spec}"
        );
    }

    #[test]
    fn a_gpu_that_is_held_back_is_declared_and_nothing_else() {
        let folder = temp_dir();
        let base = folder.path();
        let (mut publication, gpu) = publication(base);
        publication.hold.by_default = true;
        let has_node = || {
            std::fs::read_to_string(base.join("nvidia.yaml"))
                .unwrap()
                .contains("/dev/nvidia3")
        };
        let held = |held| Update::HeldBack {
            gpu,
            held,
            after: None,
        };
        publication.apply(vec![Update::Roster]);
        assert_eq!(
            publication.apply(vec![ready(gpu, 3)]),
            [gpu],
            "its report is done"
        );
        assert!(!has_node());
        publication.apply(vec![held(false)]);
        assert!(has_node());
        publication.apply(vec![held(true)]);
        assert!(!has_node(), "taken back");
        publication.apply(vec![held(false)]);
        assert!(has_node());
        // The default is for GPUs that come later.
        publication.apply(vec![
            Update::HeldByDefault(false),
            Update::HeldByDefault(true),
        ]);
        assert!(has_node());
        // Before the GPU's node exists, and after its failure.
        publication.apply(vec![
            Update::Failed { gpu, reason: None },
            held(true),
            held(false),
        ]);
        assert!(!has_node());
    }

    #[test]
    fn a_file_published_at_once_lacks_the_gpus_held_back() {
        let folder = temp_dir();
        let base = folder.path();
        let (mut publication, gpu) = publication(base);
        (publication.withheld, publication.hold.by_default) = (true, true);
        publication.apply(vec![ready(gpu, 3)]);
        assert!(!base.join("nvidia.yaml").exists());
        publication.apply(vec![
            Update::HeldBack {
                gpu,
                held: false,
                after: None,
            },
            Update::Settled,
        ]);
        assert!(
            std::fs::read_to_string(base.join("nvidia.yaml"))
                .unwrap()
                .contains("/dev/nvidia3")
        );
    }
}
