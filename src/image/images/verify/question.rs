//! Parameters of a check.

use crate::images::disk_image::hash_tree::State;
use kata_gpu_init::gpu::topology::Topology;
use std::path::PathBuf;

/// Program that the kernel starts in an initrd, unless rdinit= names another.
pub const INIT: &str = "/init";

/// Program that the kernel starts first on a disk, unless init= names another.
pub const INIT_OF_DISK: &str = "/sbin/init";

/// Parameters of a check.
#[derive(Clone, Debug)]
pub struct Question {
    /// The kernel's release, if known.
    pub release: Option<String>,
    pub init: String,
    /// Whether the driver's libraries and firmware must be in the image.
    pub user_space: bool,
    /// Root of the driver, as gpuinit.driver-root= names it; None: the init finds one.
    pub driver_root: Option<PathBuf>,
    /// Kinds of guests whose services must be in the image.
    pub topologies: Vec<Topology>,
    /// Whether the guests of `topologies` are confidential.
    pub confidential: bool,
    /// State of a disk image's hash tree, which no file of its root shows.
    pub hash_tree: Option<State>,
}

impl Default for Question {
    fn default() -> Self {
        Self {
            release: None,
            init: INIT.into(),
            user_space: true,
            driver_root: None,
            topologies: Vec::new(),
            confidential: false,
            hash_tree: None,
        }
    }
}
