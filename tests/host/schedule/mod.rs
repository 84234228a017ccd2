//! Order of a bring-up in virtual time: the model, its best order, and its properties.

mod computes;
mod model;
mod optimum;
mod properties;

use kata_gpu_tests::schedule::locks::{Micros, Times};

const MS: Micros = 1000;
/// An H100 on a host that maps its BARs in a second.
const MEDIUM: Times = Times {
    enable: 1000 * MS,
    firewall: 0,
    probe: 3 * MS,
    s1: 300 * MS,
    s2: 1300 * MS,
    s3: 500 * MS,
};
