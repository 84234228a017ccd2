//! Paths of an installation.

use std::path::PathBuf;

/// Places of an install on a node.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Place {
    /// On a cluster's node: folder for this runtime's copies of the guest.
    #[arg(long, value_name = "DIR")]
    pub node: Option<PathBuf>,
    /// File of Node Feature Discovery, whose name becomes a label.
    #[arg(long, value_name = "FILE", requires = "node")]
    pub node_feature: Option<PathBuf>,
}
