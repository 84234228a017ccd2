//! What an image is checked for.

use crate::topology::Topology;

/// What the kernel starts in an initrd, unless rdinit= names another program.
pub const INIT: &str = "/init";

/// How an image is to be checked.
#[derive(Clone, Debug)]
pub struct Question {
    /// The kernel's release, where it is known.
    pub release: Option<String>,
    pub init: String,
    /// Whether the driver's libraries and firmware are to be there.
    pub user_space: bool,
    /// Kinds of guests whose services must be there.
    pub topologies: Vec<Topology>,
    /// Those guests are confidential.
    pub confidential: bool,
}

impl Default for Question {
    fn default() -> Self {
        Self { release: None, init: INIT.into(), user_space: true, topologies: Vec::new(), confidential: false }
    }
}
