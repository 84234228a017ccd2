//! A failure means that an agent that reads at the wrong moment sees a spec torn, missing or empty.
//! Control: the same race is lost by a spec that is written in place.

use crate::{TempDir, write};
use container_device_interface_1::cache::{new_cache, with_auto_refresh};
use container_device_interface_1::spec_dirs::with_spec_dirs;
use kata_gpu_init::cdi::publish::{FILE, Publisher};
use kata_gpu_init::cdi::spec::{Device, Entry, Options, Ready, generate};
use kata_gpu_init::gpu::device_nodes::Node;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

const PUBLICATIONS: usize = 2000;
const GPUS: usize = 8;

/// Eight GPUs of which the first `ready` are.
fn devices(ready: usize) -> Vec<Device> {
    let node = |minor: u32| Node {
        path: format!("/dev/nvidia{minor}").into(),
        major: 195,
        minor,
        mode: 0o666,
        gid: 0,
    };
    (0..GPUS)
        .map(|index| Device {
            index,
            address: format!("0001:00:{index:02x}.0").parse().unwrap(),
            entry: if index < ready {
                Entry::Ready(Ready {
                    nodes: vec![node(index as u32)],
                    ..Ready::default()
                })
            } else {
                Entry::Pending
            },
        })
        .collect()
}

/// Reads `directory` as the agent does until `done`; gives how often, and the first thing that was
/// not as it must be.
fn read_until(done: &AtomicBool, directory: &Path) -> (usize, Option<String>) {
    let cache = new_cache(vec![
        with_auto_refresh(false),
        with_spec_dirs(&[directory.to_str().unwrap()]),
    ]);
    let (mut reads, mut wrong) = (0, None);
    while !done.load(Ordering::Relaxed) {
        let mut cache = cache.lock().unwrap();
        let seen = match cache.refresh() {
            Err(error) => Some(format!("does not load: {error}")),
            Ok(()) => match cache.list_devices().len() {
                n if n == GPUS + 1 => None,
                n => Some(format!("{n} devices")),
            },
        };
        reads += 1;
        wrong = wrong.or(seen);
    }
    (reads, wrong)
}

fn race(directory: &Path, publish: impl Fn(&[Device])) -> (usize, Option<String>) {
    let done = AtomicBool::new(false);
    publish(&devices(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read_until(&done, directory));
        (0..PUBLICATIONS).for_each(|n| publish(&devices(n % (GPUS + 1))));
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    })
}

#[test]
fn no_publication_of_2000_is_seen_torn_missing_or_empty() {
    let directory = TempDir::new("publications");
    let publisher = Publisher::new(&directory.0).unwrap();
    let (reads, wrong) = race(&directory.0, |devices| {
        publisher
            .publish(&generate(devices, &[], None, &Options::default()))
            .unwrap();
        std::thread::yield_now();
    });
    assert_eq!(wrong, None, "in {reads} reads");
    assert!(reads > 10, "the reader read only {reads} times");
}

/// Negative control: the same race without rename is lost.
#[test]
fn a_spec_that_is_written_in_place_is_seen_torn() {
    let directory = TempDir::new("in-place");
    let file = directory.0.join(FILE);
    let (reads, wrong) = race(&directory.0, |devices| {
        let text = generate(devices, &[], None, &Options::default()).to_json();
        write(&file, &text[..text.len() / 2]);
        std::thread::yield_now();
        write(&file, &text);
    });
    assert!(
        wrong.is_some(),
        "{reads} reads of half-written files, and all were whole"
    );
}
