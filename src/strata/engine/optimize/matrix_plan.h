// The owners of Muon's matrices: which rank of a shard group orthogonalizes which matrix, and in
// which windows matrices travel to their owners and back. Pure arithmetic on shapes and layouts,
// the same on every rank. Threads: any.
//
//   in place   matrices of a parameter that are apart, as experts are, and lie whole in one rank's
//              slices stay there
//   in turn    where none stays in place: of as many units as there are ranks, all alike, each rank
//              owns one unit's matrices
//   the rest   by cost: the dearest first, each to the rank that has the least, in place or owned
//
// A window has some elements for each owner at most, or one matrix: so memory is bounded.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "strata/base/units.h"
#include "strata/comm/parcels.h"

namespace strata::engine {

// A parameter of which Muon updates all matrices, in the flat buffer of its unit.
struct MatrixParam {
  int unit = 0;
  int param = 0;
  Numel offset;
  Numel numel;
  Numel shard;             // elements of a slice of the unit
  std::int64_t apart = 1;  // equal matrices, or pieces of several, one after the other
  double cost = 0.0;       // of all its matrices
};

// Elements of a parameter, whole matrices, that one rank orthogonalizes.
struct MatrixRun {
  int unit = 0;
  int param = 0;
  Numel begin;  // in the parameter
  Numel numel;
  int owner = 0;  // its position in the shard group
  Bytes place;    // in the owner's workspace, in bf16 as all bytes here
};

// Elements of a run that lie in one rank's slice.
struct MatrixPiece {
  std::size_t run = 0;
  int holder = 0;
  Numel first;  // in the run
  Numel numel;
  Numel at;         // in the holder's slice
  Bytes in_source;  // of the holder's parcels
  Bytes in_target;  // of the owner's
};

struct MatrixWindow {
  std::vector<MatrixRun> runs;
  std::vector<MatrixPiece> pieces;  // in the order of runs
  comm::Parcels there{0};           // empty where all stay in place
  comm::Parcels back{0};
  Bytes workspace;  // of the owner that has the most
};

struct MatrixPlan {
  std::vector<MatrixWindow> exchanged;
  std::vector<MatrixWindow> in_place;  // those of this rank
  // The most that a rank needs: of parcels in one direction, given and taken, and for matrices.
  Bytes given;
  Bytes taken;
  Bytes workspace;
};

// The most elements of a window for each owner. Matrices in place need memory once, and make better
// use of a device in larger batches.
struct WindowBounds {
  Numel exchanged{std::int64_t{32} << 20};
  Numel in_place{std::int64_t{64} << 20};
};

// `params` in the order of units; `position`: this rank's of `ranks`.
MatrixPlan plan_matrices(std::span<const MatrixParam> params, int ranks, int position,
                         const WindowBounds& most = {});

}  // namespace strata::engine
