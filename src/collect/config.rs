//! Configuration of a collector.

use super::fleet::pushing::{Kubernetes, Otlp};
use super::keep::Keep;
use super::limits::Limits;
use super::privileges::RunAs;
use super::vm_dirs::Pattern;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Sockets to listen on, and directory to write to.
#[derive(Clone, Debug, Default)]
pub struct Config {
    pub dir: PathBuf,
    pub port: u32,
    pub vsock: bool,
    /// Base paths of hybrid vsock devices.
    pub uds: Vec<PathBuf>,
    /// Base paths of hybrid vsock devices that come and go.
    pub vms: Vec<Pattern>,
    /// Kata's files about sandboxes.
    pub sandboxes: Vec<Pattern>,
    /// OCI configurations of sandbox containers; `*` is the id.
    pub bundles: Vec<Pattern>,
    pub limits: Limits,
    pub keep: Keep,
    pub run_as: Option<RunAs>,
    /// Receiver of boots that are over.
    pub otlp: Option<Otlp>,
    /// Receiver of boots that failed.
    pub events: Option<Kubernetes>,
    /// Address of the metrics for Prometheus.
    pub metrics: Option<SocketAddr>,
    /// Build id of this program, for the metrics.
    pub build_id: String,
    /// Drop privileges that this process does not need. Requires a single thread.
    pub drop_privileges: bool,
}

impl Config {
    /// Configuration without any socket to listen on.
    pub fn new(dir: PathBuf, port: u32) -> Self {
        Self {
            dir,
            port,
            ..Self::default()
        }
    }
}
