//! Paths of an installation.

use std::path::PathBuf;

/// Where an install on a node puts things.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Place {
    /// On a node of a cluster: the folder, for this configuration alone, that the initrd or image
    /// is copied to under a name with its hash. The former copy stays there, older ones are
    /// removed, and uninstall removes all.
    #[arg(long = "node", value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// File of Node Feature Discovery that is there while it is installed: the node has the label
    /// feature.node.kubernetes.io/NAME=true then, NAME being the file's.
    #[arg(long, value_name = "FILE", requires = "dir")]
    pub node_feature: Option<PathBuf>,
}
