//! A boot read from its file, with its model.

use crate::boot::model::Boot;
use crate::data::agent_log;
use crate::data::boot_dir::read_boot;
use crate::data::boot_file::BootFile;
use anyhow::Result;
use std::path::Path;

/// File and model of a boot.
pub struct Loaded {
    pub file: BootFile,
    pub boot: Boot,
}

/// Reads a boot, and the console log beside it if there is one and no other was named.
pub fn load(path: &Path, console: Option<&Path>) -> Result<Loaded> {
    let file = read_boot(path)?;
    let agent = agent_log::of_boot(path, file.sandbox_id(), console)?;
    let boot = Boot::new(&file, &agent);
    Ok(Loaded { file, boot })
}
