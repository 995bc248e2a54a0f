// Our declarations of a library's functions against the library's own.
#pragma once

#include <type_traits>

namespace qkv::test {

// The same to a call: pointers, or numbers of one size. Enums are ours on one side and the library's on the other.
template <class Ours, class Theirs>
constexpr bool same_argument = (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) ||
                               (!std::is_pointer_v<Ours> && !std::is_pointer_v<Theirs> &&
                                sizeof(Ours) == sizeof(Theirs) &&
                                std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>);

template <class Ours, class Theirs>
struct SameCall : std::false_type {};
template <class Result, class... Ours, class TheirResult, class... Theirs>
requires(sizeof...(Ours) == sizeof...(Theirs)) struct SameCall<Result (*)(Ours...), TheirResult (*)(Theirs...)>
    : std::bool_constant<same_argument<Result, TheirResult> && (same_argument<Ours, Theirs> && ...)> {
};

template <class Table, class Ours, class Theirs>
constexpr bool same_call(Ours Table::*, Theirs*) {
  return SameCall<Ours, Theirs*>();
}

}  // namespace qkv::test
