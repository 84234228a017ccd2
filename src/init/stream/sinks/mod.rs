//! Outputs of the stream. Every sink reads the ring at its own pace, and none is ever waited for:
//!
//! - [`vsock`]: to the collector on the host, replayed after every reconnect;
//! - [`listener`]: replay, then live, for readers in the guest (unix socket, vsock);
//! - [`console`]: lines in the agent's own shape on /dev/console; [`redirect`] keeps the agent's
//!   own lines from it while a GPU is enabled.
//!
//! The file `/run/kata-gpu-init/boot.ndjson` is no sink but the ring's own
//! [journal](super::journal).

pub mod console;
pub mod listener;
pub mod redirect;
pub mod stream;
pub mod vsock;
