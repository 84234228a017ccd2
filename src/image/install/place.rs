//! Paths of an installation.

use std::path::PathBuf;

/// Places of an install on a node.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct Place {
    /// On a node of a cluster: folder, for this configuration alone, that the initrd or image is
    /// copied to, under a name with its hash. The former copy stays there, older ones are removed,
    /// and --remove removes all.
    #[arg(long, value_name = "DIR")]
    pub node: Option<PathBuf>,
    /// File of Node Feature Discovery that exists during the installation: the node then has the
    /// label feature.node.kubernetes.io/NAME=true, NAME being the file's.
    #[arg(long, value_name = "FILE", requires = "node")]
    pub node_feature: Option<PathBuf>,
}
